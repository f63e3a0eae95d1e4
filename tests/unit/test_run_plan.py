"""The plan that `kvferry run` makes of a command line: pure, so nothing is started here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.errors import KvferryError
from kvferryd.run.engines import known, shown
from kvferryd.run.plan import Plan, described, plan, split

TP2 = "vllm serve m --tensor-parallel-size 2"
SPLIT = "--disaggregation-mode decode"
OTHER = json.dumps({"kv_connector": "LMCacheConnectorV1"})


def planned(
    command: str,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    gpus: int = 8,
    **given: object,
) -> Plan:
    """The plan of settings that the user gave as flags, and a command as a shell reads it."""
    return plan(
        given, shlex.split(command), environment or {}, folder="/f", gpus=lambda: gpus,
        read=(files or {}).__getitem__, engine_stop_s=60,
    )  # fmt: skip


def refused(command: str, environment: Mapping[str, str] | None = None, **more: Any) -> str:
    with pytest.raises(KvferryError) as caught:
        planned(command, environment, **more)
    assert caught.value.remedy
    return str(caught.value)


def connector(of: Plan) -> dict[str, Any]:
    """The settings that vLLM is told."""
    assert of.engine[-2] == "--kv-transfer-config" and of.engine.count("--kv-transfer-config") == 1
    return dict(json.loads(of.engine[-1]))


def test_ranks_have_daemons_by_rule() -> None:
    made = planned(TP2)
    assert [(each.config.device, each.config.rest, each.config.peer) for each in made.daemons] == [
        ("cuda:0", "127.0.0.1:7410", "127.0.0.1:7411"), ("cuda:1", "127.0.0.1:7420", "127.0.0.1:7421")
    ]  # fmt: skip
    assert [str(each.config.engine_socket) for each in made.daemons] == ["/f/engine-0.sock", "/f/engine-1.sock"]
    assert {each.config.roster for each in made.daemons} == {"127.0.0.1:7411"}
    assert connector(made) == {
        "kv_connector": "KvferryConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": "/f/engine-{rank}.sock"},
    }  # fmt: skip
    assert made.engine[:5] == ("vllm", "serve", "m", "--tensor-parallel-size", "2")


def test_one_rank_has_no_roster() -> None:
    assert [each.config.roster for each in planned("vllm serve m").daemons] == [None]


def test_the_flags_of_a_keeper_are_what_it_was_planned_with() -> None:
    made = planned("vllm serve m", way="staged", allow_peers=["10.0.0.0/16", "::1"], checksum=True, strict=False)
    flags = set(made.daemons[0].flags)
    assert {"--way=staged", "--allow-peers=10.0.0.0/16", "--allow-peers=::1", "--checksum", "--no-strict"} <= flags


def test_addresses_that_are_named_move_by_rank(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    made = planned(TP2, rest="[::1]:8000", peer="0.0.0.0:9000", advertise="10.0.0.7:9000",
                   peer_secret_file=str(secret))  # fmt: skip
    last = made.daemons[-1].config
    assert (last.rest, last.peer, last.advertise) == ("[::1]:8010", "0.0.0.0:9010", "10.0.0.7:9010")
    assert last.roster == "10.0.0.7:9000"


def test_settings_of_the_environment_count() -> None:
    made = planned(TP2, {"KVFERRY_REST": "127.0.0.1:7500", "KVFERRY_DEVICE": "cpu"}, gpus=0)
    assert [each.config.rest for each in made.daemons] == ["127.0.0.1:7500", "127.0.0.1:7510"]
    assert {each.config.device for each in made.daemons} == {"cpu"}


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("vllm serve m", 1),
        ("vllm serve m -tp 4 -pp=2", 8),
        ("vllm serve m --tensor_parallel_size=2 --prefill-context-parallel-size 2 -dp 1", 4),
        ("vllm serve m -tp 8 --tensor-parallel-size 2", 2),
        ("env X=1 numactl -n 0 /opt/bin/vllm serve m -tp 2", 2),
        ("python3 -m vllm.entrypoints.openai.api_server --model m -tp 2", 2),
        (f"python -m sglang.launch_server --tp 2 {SPLIT}", 2),
        (f"sglang serve --tp-size=2 --pp-size 2 {SPLIT}", 4),
        ("python -m kvferry.reference serve --tp 3", 3),
    ],
)
def test_an_engine_says_how_many_ranks_it_has(command: str, ranks: int) -> None:
    assert len(planned(command).daemons) == ranks


def test_vllms_file_of_options_counts_behind_the_command_line() -> None:
    files = {"o.yaml": "# ours\ntensor-parallel-size: 4  # cards\npipeline_parallel_size: '2'\n"}
    assert len(planned("vllm serve m --config o.yaml", files=files).daemons) == 8
    assert len(planned("vllm serve m --config o.yaml -tp 1", files=files).daemons) == 2
    files = {"o.yaml": "kv-transfer-config:\n  kv_connector: KvferryConnector\n"}
    assert "on the command line" in refused("vllm serve m --config o.yaml", files=files)


@pytest.mark.parametrize(
    ("command", "gpus", "given", "devices"),
    [
        (TP2, 0, {}, ["cpu", "cpu"]),
        (TP2, 2, {"device": "cpu"}, ["cpu", "cpu"]),
        (TP2, 2, {"device": "cuda:0"}, ["cuda:0", "cuda:1"]),
        ("python -m kvferry.reference serve", 2, {}, ["cpu"]),
        (f"python -m sglang.launch_server --device cpu {SPLIT}", 2, {}, ["cpu"]),
        (f"python -m sglang.launch_server --tp 2 --base-gpu-id 4 --gpu-id-step 2 {SPLIT}", 8, {}, ["cuda:4", "cuda:6"]),
    ],
)
def test_a_rank_has_the_gpu_that_the_engine_takes(
    command: str, gpus: int, given: dict[str, Any], devices: list[str]
) -> None:
    assert [each.config.device for each in planned(command, gpus=gpus, **given).daemons] == devices


def test_what_the_user_has_told_the_connector_stays() -> None:
    told = {"kv_connector": "KvferryConnector", "kv_role": "kv_producer", "engine_id": "p",
            "kv_connector_extra_config": {"socket": "/s/{local_rank}.sock", "progressive": True}}  # fmt: skip
    made = planned(f"{TP2} --kv-transfer-config {shlex.quote(json.dumps(told))} --seed 0")
    assert connector(made) == told
    assert [str(each.config.engine_socket) for each in made.daemons] == ["/s/0.sock", "/s/1.sock"]
    assert made.engine[5:7] == ("--seed", "0")


def test_kvferrys_connector_is_found_among_others() -> None:
    ours = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.vllm"}
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several |= {"kv_connector_extra_config": {"connectors": [{"kv_connector": "OffloadingConnector"}, ours]}}
    made = connector(planned(f"vllm serve m --kv-transfer-config={shlex.quote(json.dumps(several))}"))
    offloading, found = made["kv_connector_extra_config"]["connectors"]
    assert offloading == {"kv_connector": "OffloadingConnector"}
    assert found == ours | {"kv_role": "kv_both", "kv_connector_extra_config": {"socket": "/f/engine-{rank}.sock"}}


def test_the_module_is_named_where_vllm_loads_other_plug_ins() -> None:
    assert connector(planned("vllm serve m", {"VLLM_PLUGINS": "lora"}))["kv_connector_module_path"] == "kvferry.vllm"
    assert "kv_connector_module_path" not in connector(planned("vllm serve m", {"VLLM_PLUGINS": "lora,kvferry"}))


def test_a_socket_of_the_settings_goes_to_the_engine() -> None:
    made = planned(TP2, engine_socket="/run/kvferry/p-{rank}.sock")
    assert connector(made)["kv_connector_extra_config"]["socket"] == "/run/kvferry/p-{rank}.sock"
    assert str(made.daemons[1].config.engine_socket) == "/run/kvferry/p-1.sock"


def test_sglang_is_told_by_variables() -> None:
    made = planned(f"python -m sglang.launch_server {SPLIT}", {"TMPDIR": "/t", "USER": "u"})
    assert made.engine[-2:] == ("--disaggregation-transfer-backend", "kvferry")
    assert made.environment == {
        "KVFERRY_SGLANG_SOCKET": "/f/engine-{rank}.sock",
        "TMPDIR": "/f",
        "TORCHINDUCTOR_CACHE_DIR": "/t/torchinductor_u",
    }
    command = (
        f"env KVFERRY_SGLANG_SOCKET=/s/{{rank}}.sock sglang serve {SPLIT} --disaggregation-transfer-backend kvferry"
    )
    told = planned(command)
    assert "KVFERRY_SGLANG_SOCKET" not in told.environment and told.engine == tuple(shlex.split(command))
    assert str(told.daemons[0].config.engine_socket) == "/s/0.sock"


def test_the_reference_engine_is_told_of_each_rank() -> None:
    made = planned("python -m kvferry.reference serve --tp 2")
    assert made.engine[-4:] == ("--daemon", "/f/engine-0.sock", "--daemon", "/f/engine-1.sock")


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("./start.sh", {}, "starts no engine that kvferry run knows (command = ./start.sh)"),
        ("vllm bench", {}, "within a script write kvferry run -- before it"),
        ("env CUDA_VISIBLE_DEVICES=1 vllm serve m", {}, "set it before `kvferry run`"),
        ("vllm serve m -tp two", {}, "--tensor-parallel-size is no number (--tensor-parallel-size = 'two')"),
        ("vllm serve m -dp 2", {}, "--data-parallel-size asks for several engines"),
        ("vllm serve m --nnodes 2", {}, "--nnodes asks for several hosts"),
        (f"vllm serve m --kv-transfer-config {shlex.quote(OTHER)}", {}, "(kv_connector = LMCacheConnectorV1)"),
        ("vllm serve m --kv-transfer-config {", {}, "is not JSON"),
        ("vllm serve m --kv-transfer-config {} --kv_transfer_config={}", {}, "is given 2 times"),
        ("vllm serve m --kv-transfer-config.kv_role kv_both", {}, "write it as one JSON object"),
        ("python -m sglang.launch_server", {}, "add --disaggregation-mode prefill, or decode"),
        (f"sglang serve {SPLIT} --disaggregation-transfer-backend nixl", {}, "transfer-backend = nixl"),
        ("python -m kvferry.reference serve --daemon /s", {}, "leave --daemon out"),
        (TP2, {"gpus": 1}, "the engine's 2 ranks need cuda:1 (visible GPUs = 1)"),
        (TP2, {"device": "cuda:4"}, "CUDA_VISIBLE_DEVICES=4,5 kvferry run"),
        (TP2, {"engine_socket": "/s/e.sock"}, "put {rank} into the name"),
        (TP2, {"roster": "10.0.0.1:7411"}, "leave roster out"),
        (TP2, {"rest": "127.0.0.1:65530"}, "name a port from 1 to 65525"),
        ("vllm serve m", {"rest": "127.0.0.1:0"}, "name a port from 1 to 65535"),
        ("vllm serve m", {"way": "sideways"}, "bad_config"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_value_and_a_remedy(command: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(KvferryError) as caught:
        planned(command, **more)
    assert said in f"{caught.value.code} {caught.value}"


def test_two_sockets_that_differ_are_refused() -> None:
    told = shlex.quote(json.dumps({"kv_connector_extra_config": {"socket": "/s/one.sock"}}))
    said = refused(f"vllm serve m --kv-transfer-config {told}", engine_socket="/s/other.sock")
    assert "/s/one.sock" in said and "(engine_socket = /s/other.sock)" in said


def test_the_command_stands_behind_two_dashes() -> None:
    assert split(["--rest", "a:1", "--", "env", "--", "x"]) == (["--rest", "a:1"], ["env", "--", "x"])
    for without in (["vllm", "serve"], ["--rest", "a:1", "--"], []):
        with pytest.raises(KvferryError, match="no command stands behind --"):
            split(without)


def test_a_plan_can_be_read() -> None:
    first, second, *_, engine = described(planned(TP2))
    assert first.startswith("daemon-0: cuda:0, REST at http://127.0.0.1:7410, peers at 127.0.0.1:7411")
    assert second.startswith("daemon-1: cuda:1")
    assert engine.startswith("engine: vllm serve m")


def test_the_engine_of_a_plan_can_be_pasted_into_a_shell() -> None:
    plan = planned("vllm serve 'my model' --hf-overrides '{\"a\": \"b c\"}'")
    *variables, engine = [line.removeprefix("engine: ") for line in described(plan) if line.startswith("engine: ")]
    assert shlex.split(engine) == list(plan.engine)
    assert [*map(shlex.split, variables)] == [[f"{name}={value}"] for name, value in plan.environment.items()]


def test_what_stands_before_the_engines_name_is_not_read() -> None:
    engine = known(["nice", "-tp", "5", "env", "VLLM_PLUGINS=lora", "vllm", "serve", "m"], {}, str)
    assert engine.ranks == 1 and engine.environment["VLLM_PLUGINS"] == "lora"


def test_secrets_of_a_command_are_not_shown() -> None:
    words = ["env", "HF_TOKEN=hf_1", "A=b", "vllm", "serve", "m", "--api-key", "sk-1", "--api-key=sk-2", "--port", "1"]
    assert shown(words) == "env HF_TOKEN=*** A=b vllm serve m --api-key *** --api-key=*** --port 1"
    assert "sk-1" not in "".join(described(planned("vllm serve m --api-key sk-1")))
    assert "sk-1" not in refused("serve m --api-key sk-1")
    several = ["vllm", "serve", "m", "--api-key", "sk-1", "sk-2", "sk-3", "--port", "1"]  # vLLM takes a list
    assert shown(several) == "vllm serve m --api-key *** *** *** --port 1"
