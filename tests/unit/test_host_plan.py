"""The plan that `kvferry host` makes of a command line: pure, so nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.errors import KvferryError
from kvferry.memory.cuda import Device
from kvferry.sglang.options import Options as SglangOptions
from kvferry.sockets import beside
from kvferry.vllm.options import Options as VllmOptions
from kvferryd.host.plan import plan, record_of
from kvferryd.host.supervisor import LASTED_S, PAUSES_S, Place
from kvferryd.run.daemons import Daemon

EIGHT = [Device(number, f"GPU-{number}") for number in range(8)]


def planned(environment: Mapping[str, str] | None = None, gpus: int = 8, **more: Any) -> tuple[Daemon, ...]:
    own = {name: more.pop(name) for name in ("chosen", "cpus") if name in more}
    return plan(more, environment or {}, folder="/f", gpus=EIGHT[:gpus], **own)


def test_each_gpu_has_a_daemon_by_rule() -> None:
    made = planned(gpus=2)
    assert [(each.config.device, each.config.rest, each.config.peer) for each in made] == [
        ("cuda:0", "127.0.0.1:7410", "127.0.0.1:7411"), ("cuda:1", "127.0.0.1:7420", "127.0.0.1:7421")
    ]  # fmt: skip
    assert [str(each.config.engine_socket) for each in made] == ["/f/GPU-0.sock", "/f/GPU-1.sock"]
    assert {each.config.roster for each in made} == {"127.0.0.1:7411"}
    assert str(record_of(made[1])) == "/f/GPU-1.json"


def test_a_gpu_keeps_its_ports_whichever_others_are_chosen() -> None:
    made = planned(chosen="6,2-3, 2")
    assert [each.config.device for each in made] == ["cuda:2", "cuda:3", "cuda:6"]
    assert [each.config.rest for each in made] == ["127.0.0.1:7430", "127.0.0.1:7440", "127.0.0.1:7470"]
    assert {each.config.roster for each in made} == {"127.0.0.1:7431"}, "the first of those that are there"


def test_gpu_memory_is_shared_in_the_folder_unless_another_is_given() -> None:
    assert [str(each.config.node_dir) for each in planned(gpus=2)] == ["/f", "/f"]
    assert [str(each.config.node_dir) for each in planned({"KVFERRY_NODE_DIR": "/other"}, gpus=1)] == ["/other"]
    assert [each.config.node_dir for each in planned(gpus=0, cpus=2)] == [None, None]


def test_one_gpu_needs_no_roster_and_a_given_one_stays() -> None:
    assert [each.config.roster for each in planned(gpus=1)] == [None]
    assert {each.config.roster for each in planned({"KVFERRY_ROSTER": "127.0.0.1:9"}, gpus=2)} == {"127.0.0.1:9"}


def test_host_memory_on_a_machine_without_gpus() -> None:
    made = planned(gpus=0, cpus=2)
    assert [(each.config.device, str(each.config.engine_socket)) for each in made] == [
        ("cpu", "/f/cpu-0.sock"), ("cpu", "/f/cpu-1.sock")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpus": 0}, "no GPU can be seen here (--gpus = all)"),
        ({"chosen": "0-8"}, "there is no GPU 8 (--gpus = 0-8) -> 0 to 7 can be seen here"),
        ({"chosen": "3-1"}, "--gpus cannot be understood"),
        ({"chosen": "one"}, "numbers and ranges: 0-3,6"),
        ({"device": "cuda:1"}, "leave device out"),
        ({"engine_socket": "/s"}, "leave engine_socket out"),
        ({"rest": "127.0.0.1:65500"}, "daemon 4 has port 65500 + 40"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_a_remedy(more: dict[str, Any], said: str) -> None:
    with pytest.raises(KvferryError) as caught:
        planned(**more)
    assert said in str(caught.value)


def test_keepers_that_end_at_once_are_followed_ever_later() -> None:
    place = Place(planned(gpus=1)[0], began=0.0)
    pauses = []
    for _ in range(len(PAUSES_S) + 2):
        pauses.append(place.ended(place.began + 1.0))
        place.began, place.due = place.began + 1.0 + pauses[-1], None
    assert pauses == [*PAUSES_S[1:], *PAUSES_S[-1:] * 3]
    assert place.ended(place.began + LASTED_S) == 0.0, "one that has lasted ends the pauses"


def test_plug_ins_find_a_daemon_by_the_uuid_of_their_gpu() -> None:
    vllm = VllmOptions.parse({"socket": "/f/{gpu_uuid}.sock"})
    sglang = SglangOptions.read({"KVFERRY_SGLANG_SOCKET": "/f/{gpu_uuid}.sock"})
    assert beside("/f/engine.sock", None) == "/f/engine.sock"
    for find in (lambda: vllm.socket_of(1, 2, 1, 0), lambda: sglang.socket_of(1, 2)):
        with pytest.raises(KvferryError, match="an engine on the CPU has no GPU"):
            find()
