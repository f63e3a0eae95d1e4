"""The reference engine as processes: HTTP in front, one worker per rank, and what becomes of them when one dies."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from foreign_engine import leaves

from kvferry.reference.config import PRESETS
from kvferryd.demo.fleet import DaemonService, Fleet

START_S = 60
Tokens = list[int]


@dataclass
class Served:
    """A reference engine in processes of its own."""

    process: subprocess.Popen[str]
    url: str
    errors: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, prompt: object, max_tokens: int = 8, **body: object) -> dict:
        answer = self.http.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, "temperature": 0} | body,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tokens(self, prompt: object, max_tokens: int = 8, **body: object) -> Tokens:
        return self.complete(prompt, max_tokens, **body)["choices"][0]["token_ids"]

    def refused(self, **body: object) -> tuple[int, str, str]:
        answer = self.http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2} | body)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    def occupancy(self) -> dict[str, int]:
        return self.http.get("/health").json()

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self) -> int:
        self.http.close()
        self.process.terminate()
        return self.process.wait(60)


def serve(folder: Path, *options: str) -> Served:
    errors = folder / f"engine-{time.monotonic_ns()}.err"
    model = () if "--config" in options else ("--preset", "tiny")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.reference", "serve", *model, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready on "):
        process.wait(START_S)
        pytest.fail(f"the engine did not come up: {line}{errors.read_text()}")
    return Served(process, line.removeprefix("ready on ").strip(), errors)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts engines that live as long as this module's tests; none may outlive them."""
    engines: list[Served] = []

    def start(*options: str) -> Served:
        engines.append(serve(tmp_path_factory.getbasetemp(), *options))
        return engines[-1]

    yield start
    for engine in engines:
        if engine.process.poll() is None:
            assert engine.stop() == 0, engine.errors.read_text()


@pytest.fixture(scope="module")
def engine(serving: Callable[..., Served]) -> Served:
    return serving()


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 300, length).tolist()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    """True: it holds now."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


@dataclass
class Pair:
    """A prefill and a decode engine of different shape, with a daemon per rank."""

    prefill: Served
    decode: Served
    prefill_daemons: list[DaemonService]
    decode_daemons: list[DaemonService]

    def turn(self, tokens: Tokens, max_tokens: int, request_id: str, **params: object) -> tuple[dict, dict]:
        """Do as a router does: (prefill's answer, decode's answer)."""
        headers = {"X-Request-Id": request_id}
        body = {"prompt": tokens, "return_token_ids": True}
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None} | params
        first = self.prefill.http.post(
            "/v1/completions", json=body | {"max_tokens": 1, "kv_transfer_params": asked}, headers=headers
        )
        assert first.status_code == 200, first.text
        handed = first.json()["kv_transfer_params"]
        second = self.decode.http.post(
            "/v1/completions", json=body | {"max_tokens": max_tokens, "kv_transfer_params": handed}, headers=headers
        )
        assert second.status_code == 200, second.text
        return first.json(), second.json()


@contextmanager
def pair_of(folder: Path, prefill: tuple[str, ...], decode: tuple[str, ...]) -> Iterator[Pair]:
    """Daemons and engines of their own; no engine may leave an error behind."""
    fleet = Fleet(folder)
    engines: list[Served] = []
    try:
        daemons = [fleet.daemons(name, _tp(options)) for name, options in (("p", prefill), ("d", decode))]
        asyncio.run(fleet.ready(*daemons[0], *daemons[1], timeout_s=60))
        for name, options, ranks in zip(("prefill", "decode"), (prefill, decode), daemons, strict=True):
            sockets = [part for daemon in ranks for part in ("--daemon", str(daemon.socket))]
            engines.append(serve(folder, "--engine-id", name, *options, *sockets))
        yield Pair(*engines, *daemons)
    finally:
        statuses = [engine.stop() for engine in engines if engine.process.poll() is None]
        fleet.close()
    assert not any(statuses), [engine.errors.read_text() for engine in engines]


def _tp(options: tuple[str, ...]) -> int:
    return int(options[options.index("--tp") + 1]) if "--tp" in options else 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Three KV heads over two ranks to three over four, every layout parameter different."""
    with pair_of(
        tmp_path_factory.mktemp("pair"),
        ("--tp", "2", "--layout", "NHD", "--block-size", "16", "--max-tokens-per-step", "48"),
        ("--tp", "4", "--layout", "cross_layer", "--block-size", "5"),
    ) as pair:
        yield pair


def test_what_a_prefill_and_a_decode_engine_compute_alone_are_the_tokens_of_one_engine(engine, pair):
    prompts = [prompt(length, seed=length) for length in (1, 16, 70, 150)]
    expected = [engine.tokens(tokens, 16) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for other in (pair.prefill, pair.decode):
            assert list(pool.map(lambda tokens, other=other: other.tokens(tokens, 16), prompts)) == expected
            assert other.errors.read_text() == ""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--tp 2 --layout HND --block-size 5 --max-tokens-per-step 17", marks=pytest.mark.slow),
        pytest.param("--tp 4 --layout cross_layer --block-size 8", marks=pytest.mark.long),
        pytest.param("--tp 3 --layout interleaved --block-size 32", marks=pytest.mark.long),
        pytest.param("--tp 6 --layout 'head dim slot block kv layer'", marks=pytest.mark.long),
    ],
)
def test_tp_layout_block_size_and_chunks_do_not_change_a_token(engine, tmp_path, options):
    prompts = [prompt(length, seed=length) for length in (1, 16, 70, 150)]
    expected = [engine.tokens(tokens, 16) for tokens in prompts]
    other = serve(tmp_path, *shlex.split(options))
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda tokens: other.tokens(tokens, 16), prompts)) == expected
    assert other.stop() == 0
    assert other.errors.read_text() == ""


def test_a_batch_gives_what_each_request_gives_alone(serving):
    engine = serving("--no-prefix-cache", "--max-requests", "4", "--num-blocks", "64")
    prompts = [prompt(20 + 19 * i, seed=i) for i in range(8)]
    alone = [engine.tokens(tokens, 20) for tokens in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda tokens: engine.tokens(tokens, 20), prompts)) == alone
    together = engine.complete(prompts, 20)
    assert [choice["token_ids"] for choice in together["choices"]] == alone
    assert engine.occupancy()["free_blocks"] == 64


def test_a_cached_prefix_changes_no_token_and_is_told_in_the_usage(engine):
    shared = prompt(64, seed=77)
    first = engine.complete([*shared, 1, 2, 3])
    again = engine.complete([*shared, 1, 2, 3])
    other = engine.complete([*shared, 4])
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, other)]
    assert cached == [0, 64, 64]
    assert again["choices"] == first["choices"]
    generated = first["choices"][0]["token_ids"]
    whole = engine.complete([*shared, 1, 2, 3, *generated], 4)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_an_engine_goes_on_from_tokens_it_generated_itself(engine):
    start = prompt(30, seed=5)
    generated = engine.tokens(start, 40)
    rest = engine.complete(start + generated[:20], 20)
    assert rest["choices"][0]["token_ids"] == generated[20:]
    assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_a_stream_has_the_same_text_and_tokens(engine):
    whole = engine.complete("Ferry the cache", 12)
    body = {
        "prompt": "Ferry the cache", "max_tokens": 12, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with engine.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    *events, usage = [json.loads(line) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert usage["usage"]["completion_tokens"] == 12


def test_a_stop_string_ends_the_text_before_it(engine):
    text = engine.complete("Ferry the cache", 12)["choices"][0]["text"]
    named = re.findall(r"<\d+>|[ -~]", text)
    stop = named[len(named) // 2]
    answer = engine.complete("Ferry the cache", 12, stop=[stop])["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        ({"temperature": 0.7}, 400, "unsupported_parameter", "temperature"),
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"max_tokens": 0}, 400, "malformed_request", "max_tokens"),
        ({"prompt": []}, 400, "malformed_request", "prompt"),
        ({"prompt": [5, 300]}, 400, "malformed_request", "prompt"),
        ({"prompt": [-1]}, 400, "malformed_request", "prompt"),
        ({"prompt": [1] * 9000}, 400, "prompt_too_long", "prompt"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 400, "malformed_kv_transfer_params", "remote_engine_id"),
        (
            {"kv_transfer_params": {"do_remote_prefill": "yes"}},
            400,
            "malformed_kv_transfer_params",
            "do_remote_prefill",
        ),
        ({"kv_transfer_params": {"remote_port": 2**40}}, 400, "malformed_kv_transfer_params", "remote_port"),
        (
            {"kv_transfer_params": {"remote_block_ids": [["x"]]}},
            400,
            "malformed_kv_transfer_params",
            "remote_block_ids",
        ),
        ({"kv_transfer_params": {"remote_host": "a b/../c"}}, 400, "malformed_kv_transfer_params", "remote_host"),
        ({"kv_transfer_params": {"remote_num_tokens": -4}}, 400, "malformed_kv_transfer_params", "remote_num_tokens"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "no_daemon", "kv_transfer_params"),
    ],
)
def test_what_is_malformed_is_refused_by_name_and_the_engine_goes_on(engine, body, status, code, field):
    before = engine.tokens([1, 2, 3])
    assert engine.refused(**body)[:2] == (status, code)
    assert field in engine.refused(**body)[2]
    assert engine.tokens([1, 2, 3]) == before


def test_a_client_that_goes_away_frees_its_blocks(engine):
    free = engine.occupancy()["free_blocks"]
    body = json.dumps({"prompt": prompt(50, seed=9), "max_tokens": 4000}).encode()
    for streamed in (b"", b'"stream": true, '):
        sent = body.replace(b"{", b"{" + streamed, 1)
        with socket.create_connection((engine.http.base_url.host, engine.http.base_url.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(sent)}\r\n\r\n".encode()
                + sent
            )
            wait_until(lambda: engine.occupancy()["running"] == 1)
        wait_until(lambda: engine.occupancy()["free_blocks"] >= free)


@pytest.mark.slow
def test_eight_prompts_of_200_tokens_are_answered_at_once(serving):
    engine = serving("--preset", "demo", "--tp", "2", "--no-prefix-cache")
    answers = engine.complete([prompt(200, seed=i) for i in range(8)], 32)
    assert [len(choice["token_ids"]) for choice in answers["choices"]] == [32] * 8


def test_a_killed_worker_brings_the_engine_down_with_its_name(tmp_path):
    engine = serve(tmp_path, "--tp", "2")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.http.post, "/v1/completions", json={"prompt": prompt(50), "max_tokens": 4000})
        wait_until(lambda: httpx.get(f"{engine.url}/health").json()["running"] == 1)
        engine.workers()[1].kill()
        assert answer.result(60).status_code == 503
        assert answer.result().json()["error"]["code"] == "worker_failed"
    assert engine.process.wait(60) == 1
    assert "the worker of rank" in engine.errors.read_text()


@pytest.mark.slow
def test_an_idle_worker_that_dies_brings_the_engine_down_too(tmp_path):
    engine = serve(tmp_path)
    engine.workers()[0].kill()
    assert engine.process.wait(60) == 1
    assert "the worker of rank 0" in engine.errors.read_text()


def test_no_worker_outlives_a_killed_driver(tmp_path):
    engine = serve(tmp_path)
    workers = engine.workers()
    assert len(workers) == 1
    engine.process.kill()
    engine.process.wait(60)
    wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_a_missing_daemon_is_told_at_start(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "kvferry.reference", "serve", "--preset", "tiny", "--port", "0",
         "--daemon", str(tmp_path / "none.sock"), "--daemon-timeout-s", "1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    assert "none.sock" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("length", [1, 5, 16, 47, 150])
def test_decode_goes_on_from_what_prefill_computed(engine, pair, length):
    tokens = prompt(length, seed=100 + length)
    expected = engine.tokens(tokens, 24)
    first, second = pair.turn(tokens, 24, f"turn-{length}")
    assert first["choices"][0]["token_ids"] == expected[:1]
    assert second["choices"][0]["token_ids"] == expected
    assert second["usage"]["prompt_tokens_details"]["received_tokens"] == length
    assert first["kv_transfer_params"]["remote_num_tokens"] == length


def test_blocks_go_back_when_the_reader_is_done(pair):
    wait_until(lambda: pair.prefill.occupancy()["free_blocks"] == 512)
    pair.turn(prompt(100, seed=1), 4, "blocks")
    wait_until(lambda: pair.prefill.occupancy()["free_blocks"] == 512)
    wait_until(lambda: pair.decode.occupancy()["free_blocks"] == 512)


def test_only_what_decode_does_not_hold_is_moved(engine, pair):
    shared = prompt(90, seed=2)
    pair.turn([*shared, 1, 2], 4, "prefix-1")
    _, second = pair.turn([*shared, 3, 4, 5], 12, "prefix-2")
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 90, "received_tokens": 3}
    assert second["choices"][0]["token_ids"] == engine.tokens([*shared, 3, 4, 5], 12)


def test_many_requests_cross_at_once(engine, pair):
    prompts = [prompt(60 + 13 * i, seed=200 + i) for i in range(8)]
    expected = [engine.tokens(tokens, 16) for tokens in prompts]
    with ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(lambda i: pair.turn(prompts[i], 16, f"many-{i}")[1], range(8)))
    assert [turn["choices"][0]["token_ids"] for turn in turns] == expected


def test_the_next_turn_flows_back_from_decode_to_prefill(engine, pair):
    tokens = prompt(70, seed=3)
    whole = engine.tokens(tokens, 10)
    headers = {"X-Request-Id": "turn-1"}
    handed = pair.prefill.http.post(
        "/v1/completions",
        json={"prompt": tokens, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
        headers=headers,
    ).json()["kv_transfer_params"]
    back = pair.decode.complete(tokens, 10, kv_transfer_params=handed | {"do_remote_decode": True})
    assert back["choices"][0]["token_ids"] == whole
    params = back["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (False, True)
    assert params["remote_num_tokens"] == 79
    following = tokens + whole + prompt(20, seed=4)
    first, second = pair.turn(following, 10, "turn-2", **params)
    received = first["usage"]["prompt_tokens_details"]
    assert received["received_tokens"] + received["cached_tokens"] == 79
    assert first["choices"][0]["token_ids"] == engine.tokens(following, 1)
    assert second["choices"][0]["token_ids"] == engine.tokens(following, 10)


@contextmanager
def stands_still(service: Served | DaemonService) -> Iterator[None]:
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


def leases_of(daemon: DaemonService, request_id: str) -> list[dict]:
    leases = httpx.get(f"{daemon.url}/v1/leases?ended=100", timeout=60).json()["leases"]
    return [lease for lease in leases if lease["request_id"] == request_id]


def test_a_handover_carries_the_epoch_and_the_lease_and_its_record_has_the_attempt(pair):
    handed, attempts = [], []
    for request_id in ("numbered-1", "numbered-2"):
        first, _ = pair.turn(prompt(60, seed=len(handed)), 2, request_id)
        handed.append(first["kv_transfer_params"])
        asked = httpx.get(f"{pair.decode_daemons[3].url}/v1/transfers?request_id={request_id}", timeout=60).json()
        (record,) = asked["transfers"]
        read = record["source"]["epoch"], record["source"]["lease"], record["lease"]
        assert read == (handed[-1]["remote_epoch"], handed[-1]["remote_lease"], handed[-1]["remote_lease"])
        attempts.append(record["attempt"])
        for daemon in pair.prefill_daemons:
            (lease,) = leases_of(daemon, request_id)
            assert (lease["epoch"], lease["lease"]) == read[:2]
            assert {reader["attempt"] for reader in lease["readers"]} == {record["attempt"]}
    assert handed[0]["remote_epoch"] == handed[1]["remote_epoch"]
    assert handed[0]["remote_lease"] < handed[1]["remote_lease"] and 0 < attempts[0] < attempts[1]


def test_a_long_prefill_is_published_while_it_computes(engine, pair):
    tokens = prompt(2000, seed=14)
    body = {"prompt": tokens, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(
            pair.prefill.http.post, "/v1/completions", json=body, headers={"X-Request-Id": "progressive"}
        )
        seen = set()
        while not prefill.done():
            with stands_still(pair.prefill):  # the prefill does not end before it has been looked at often enough
                leases = leases_of(pair.prefill_daemons[1], "progressive")
            seen |= {(lease["state"], lease["num_tokens"]) for lease in leases}
            time.sleep(0.02)
        handed = prefill.result().json()["kv_transfer_params"]
    assert len({tokens for state, tokens in seen if state == "publishing" and 0 < tokens < 2000}) > 1, seen
    assert pair.decode.tokens(tokens, 5, kv_transfer_params=handed) == engine.tokens(tokens, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_request_id": "never-published"},
        {"remote_engine_id": "nobody"},
        {"remote_epoch": "an older start"},
        {"remote_host": "192.0.2.1"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_kv_that_does_not_come_fails_its_request_only(engine, pair, tmp_path, wrong):
    tokens = prompt(40, seed=8)
    params = {
        "do_remote_prefill": True, "remote_engine_id": "prefill", "remote_request_id": "x", "remote_host": "127.0.0.1",
        "remote_port": int(pair.prefill_daemons[0].peer.rpartition(":")[2]), "remote_num_tokens": 40,
    } | wrong  # fmt: skip
    before = pair.decode.occupancy()["free_blocks"]
    body = {"prompt": tokens, "max_tokens": 4, "kv_transfer_params": params}
    if "remote_request_id" in wrong:  # it may still be published: who asked waits, and leaves
        waits = lambda: wait_until(lambda: pair.decode.occupancy()["free_blocks"] < before)  # noqa: E731
        leaves(f"{pair.decode.url}/v1/completions", waits, json=body)
    else:
        answer = pair.decode.http.post("/v1/completions", json=body)
        assert answer.status_code == 502, answer.text
        assert answer.json()["error"]["code"]
    wait_until(lambda: pair.decode.occupancy()["free_blocks"] == before)
    assert pair.decode.tokens([1, 2, 3]) == engine.tokens([1, 2, 3])


def test_a_number_of_a_lease_that_a_client_makes_up_waits_for_that_one_and_harms_no_other(engine, pair):
    tokens = prompt(40, seed=18)
    handed = pair.prefill.complete(tokens, 1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    before = pair.decode.occupancy()["free_blocks"]
    waits = lambda: wait_until(lambda: pair.decode.occupancy()["free_blocks"] < before)  # noqa: E731
    body = {"prompt": tokens, "max_tokens": 4, "kv_transfer_params": handed | {"remote_lease": (1 << 53) - 1}}
    leaves(f"{pair.decode.url}/v1/completions", waits, json=body)
    wait_until(lambda: pair.decode.occupancy()["free_blocks"] == before)
    answer = pair.decode.complete(tokens, 8, kv_transfer_params=handed)
    assert answer["usage"]["prompt_tokens_details"]["received_tokens"] > 0
    assert answer["choices"][0]["token_ids"] == engine.tokens(tokens, 8)


def test_a_prefill_that_is_given_up_ends_its_leases(pair):
    body = {"prompt": prompt(3000, seed=9), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    first, second = pair.prefill_daemons
    with stands_still(second):  # the prefill cannot end
        publishes = lambda: wait_until(lambda: leases_of(first, "given-up"))  # noqa: E731
        leaves(f"{pair.prefill.url}/v1/completions", publishes, json=body, headers={"X-Request-Id": "given-up"})
        wait_until(lambda: pair.prefill.occupancy()["running"] == 0)
    wait_until(lambda: pair.prefill.occupancy()["free_blocks"] == 512)
    for daemon in pair.prefill_daemons:
        assert not [lease for lease in leases_of(daemon, "given-up") if lease["state"].startswith("publish")]


def test_a_next_turn_that_prefill_holds_already_moves_nothing(engine, pair):
    tokens = prompt(64, seed=11)
    handed = pair.prefill.complete(tokens, 1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    back = pair.decode.complete(tokens, 20, kv_transfer_params=handed | {"do_remote_decode": True})
    following = tokens + back["choices"][0]["token_ids"] + prompt(40, seed=12)
    pair.prefill.complete(following, 1)
    first, second = pair.turn(following, 6, "held-already", **back["kv_transfer_params"])
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 112, "received_tokens": 0}
    assert second["choices"][0]["token_ids"] == engine.tokens(following, 6)
    wait_until(lambda: pair.decode.occupancy()["free_blocks"] == 512)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, tuple[str, ...]]]:
    """A model of full and sliding layers; decode computes what it cannot load. And the model's options."""
    folder = tmp_path_factory.mktemp("sliding")
    config = folder / "config.json"
    sliding = replace(PRESETS["tiny"], num_layers=4, window=24, sliding=(False, True) * 2)
    config.write_text(json.dumps(sliding.to_hf()))
    model = ("--config", str(config), "--seed", "5")
    prefill = ("--layout", "HND", "--block-size", "8", "--max-tokens-per-step", "32", *model)
    decode = ("--tp", "2", "--layout", "interleaved", "--on-load-failure", "recompute", *model)
    with pair_of(folder, prefill, decode) as pair:
        yield pair, model


@pytest.mark.slow
def test_sliding_layers_receive_their_window(serving, sliding):
    pair, model = sliding
    alone = serving("--no-prefix-cache", *model)
    for length in (10, 24, 100):
        tokens = prompt(length, seed=300 + length)
        _, second = pair.turn(tokens, 24, f"sliding-{length}")
        generated = second["choices"][0]["token_ids"]
        assert generated == alone.tokens(tokens, 24)
        again = tokens + generated + [9]
        assert pair.decode.tokens(again, 12) == alone.tokens(again, 12), "a window must not pass for a whole prefix"
        assert pair.turn(again, 12, f"again-{length}")[1]["choices"][0]["token_ids"] == alone.tokens(again, 12)


@pytest.mark.slow
def test_a_killed_daemon_brings_its_engine_down_with_its_name(sliding):
    """The last test of this pair: its decode engine is gone afterwards."""
    pair, _ = sliding
    pair.decode_daemons[1].process.kill()
    assert pair.decode.process.wait(60) == 1
    assert "the daemon of rank 1" in pair.decode.errors.read_text()
    assert pair.prefill.tokens([1, 2, 3])
