"""Weights that are replaced while engines serve: nothing that others computed is read, on either side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import TIMEOUT_S, refusal, until
from pair import TOKENS, Pair, half_published, is_in, order, prefilled, waits_for
from ranks import NHD, Blocks, Kv, Shape, TestEngine, describe

from kvferry.blocking import BlockingEngineClient
from kvferry.engine import TransferFailed
from kvferry.errors import KvferryError
from kvferry.fingerprint import checkpoint_name, model_fingerprint, turned
from kvferry.memory import SharedRegion
from kvferry.schemas import Awaited, LeaseState, TransferState
from kvferry.updates import SGLANG, Updates
from kvferry.weights import Adapters, Weights, digest_of_adapter
from kvferryd.demo.fleet import DaemonService
from support import refused

pytestmark = pytest.mark.anyio
SHAPE = Shape(axes=NHD, num_blocks=16)


async def replace(engine: TestEngine, weights: str) -> None:
    await asyncio.gather(*(rank.client.replace_weights(weights) for rank in engine.ranks))


@pytest.fixture
async def engines(pair: Pair) -> AsyncIterator[Pair]:
    """The shared pair, which other tests find with the weights that it registered with."""
    yield pair
    await asyncio.gather(replace(pair.prefill, ""), replace(pair.decode, ""))


async def failed_with(pair: Pair, request_id: str, code: str) -> None:
    """The receive fails on every rank, on the first by this name, and no block is touched."""
    before, blocks, source = pair.decode.snapshot(), pair.decode.take(TOKENS), pair.prefill.source()
    outcomes = await pair.decode.outcomes(request_id, blocks, source=source)
    assert all(isinstance(outcome, KvferryError) for outcome in outcomes), outcomes
    assert code in {outcome.code for outcome in outcomes if isinstance(outcome, KvferryError)}
    assert not pair.decode.differences(before)


@pytest.mark.parametrize(("there", "here"), [("B", ""), ("", "B"), ("B", "C")])
async def test_what_other_weights_computed_is_refused_before_a_byte_moves(
    engines: Pair, request_id: str, there: str, here: str
) -> None:
    await replace(engines.prefill, there)
    await replace(engines.decode, here)
    await prefilled(engines, request_id)
    await failed_with(engines, request_id, "other_weights")
    errors = [record.error for router in engines.routers for record in await router.transfers(request_id)]
    (error, *_) = [error for error in errors if error is not None and error.code == "other_weights"]
    assert repr(there) in error.message and repr(here) in error.message and error.remedy


async def test_one_name_on_both_sides_is_read(engines: Pair, request_id: str) -> None:
    await replace(engines.prefill, "B")
    kv, _ = await prefilled(engines, request_id)
    await replace(engines.decode, "B")
    await engines.decode.gets(request_id, kv, source=engines.prefill.source())


async def test_what_was_published_before_is_revoked_when_the_call_returns(engines: Pair, request_id: str) -> None:
    _, leases = await prefilled(engines, request_id)
    await replace(engines.prefill, "B")
    for router in engines.prefill_routers:
        assert request_id not in [
            lease.request_id for lease in await router.leases() if lease.state.value == "published"
        ]
    assert [await lease.ended() for lease in leases] == [LeaseState.REVOKED] * 2
    await replace(engines.decode, "B")
    await failed_with(engines, request_id, "lease_ended")


async def test_equal_weights_named_again_revoke_nothing(engines: Pair, request_id: str) -> None:
    _, leases = await prefilled(engines, request_id)
    await replace(engines.prefill, "")
    assert not any(lease.over for lease in leases)


async def test_what_is_on_its_way_to_replaced_weights_fails(engines: Pair, request_id: str) -> None:
    """A rank has begun to read what is published so far, and waits for more."""
    await half_published(engines, request_id)
    blocks = engines.decode.take(5000)
    receiving = asyncio.create_task(
        engines.decode.outcomes(request_id, blocks, source=engines.prefill.source(), deadline_s=60)
    )
    await until(lambda: is_in(engines.routers[0], request_id, TransferState.READING), "it is read")
    await replace(engines.decode, "B")
    outcomes = await receiving
    assert all(isinstance(outcome, TransferFailed) for outcome in outcomes), outcomes
    assert "other_weights" in {outcome.code for outcome in outcomes if isinstance(outcome, TransferFailed)}


async def test_a_reservation_that_waits_for_its_order_fails_with_the_weights_it_was_for(
    engines: Pair, request_id: str
) -> None:
    receiving = asyncio.create_task(engines.decode.outcomes(request_id, engines.decode.take(TOKENS)))
    await until(lambda: is_in(engines.routers[0], request_id, TransferState.WAITING), "it waits")
    await replace(engines.decode, "B")
    assert {getattr(outcome, "code", outcome) for outcome in await receiving} == {"other_weights"}


async def test_source_ranks_that_name_different_weights_are_not_read(engines: Pair, request_id: str) -> None:
    """Ranks that read both, or the one with other weights, fail; KV is of use only if all ranks have it."""
    await engines.prefill.ranks[1].client.replace_weights("B")
    await prefilled(engines, request_id)
    source, blocks = engines.prefill.source(), engines.decode.take(TOKENS)
    _, *others = await engines.decode.outcomes(request_id, blocks, source=source)
    assert all(isinstance(outcome, KvferryError) for outcome in others), others
    assert "other_weights" in {outcome.code for outcome in others if isinstance(outcome, KvferryError)}


async def test_a_request_that_a_change_has_found_under_way_is_not_published_as_the_new_weights(
    engines: Pair, request_id: str
) -> None:
    """Its first tokens were computed by the old ones: not even by an engine that says nothing of weights."""
    kv, blocks, client = Kv.random(TOKENS), engines.prefill.take(TOKENS), engines.prefill.ranks[0].client
    await engines.prefill.publish(request_id, blocks, 10, more=True)
    await replace(engines.prefill, "B")
    assert (await refusal(engines.prefill.publish(request_id, blocks, TOKENS))).code == "mixed_weights"
    with refused("mixed_weights", field="weights"):
        await client.publish(request_id, blocks.tables(), TOKENS, weights="", lease=engines.prefill.lease(request_id))
    await asyncio.gather(*(rank.client.abort(request_id) for rank in engines.prefill.ranks))
    engines.prefill.write(kv, blocks)  # computed again
    await engines.prefill.publish(request_id, blocks, TOKENS)


async def test_an_order_that_brings_its_tables_reads_for_the_weights_that_the_engine_has(
    engines: Pair, request_id: str
) -> None:
    """Its router knows nothing of them."""
    await asyncio.gather(replace(engines.prefill, "B"), replace(engines.decode, "B"))
    await prefilled(engines, request_id)
    tables = {"tables": engines.decode.take(TOKENS).json()}
    ordered = await order(engines, request_id, destination=tables)
    assert (await engines.routers[0].wait(ordered)).state is TransferState.DONE


async def test_a_name_that_is_too_long_is_refused(engines: Pair) -> None:
    client = engines.prefill.ranks[0].client
    assert ((await refusal(client.replace_weights("B" * 257))).code, client.weights) == ("malformed_weights", "")


async def test_the_daemon_shows_the_names(engines: Pair, request_id: str) -> None:
    await replace(engines.prefill, "step-7")
    await prefilled(engines, request_id)
    router = engines.prefill_routers[0]
    assert {engine.weights for engine in await router.engines()} == {"step-7"}
    assert [it.weights for it in await router.leases() if it.request_id == request_id] == ["step-7"]


@pytest.fixture
async def rank(near: DaemonService, request_id: str) -> AsyncIterator[tuple[Weights, Callable[[str, str], str]]]:
    """An engine's weights as its plug-in keeps them; a publish under a name: done, or by which code refused."""
    with BlockingEngineClient.connect(str(near.socket), engine_id=request_id, epoch="1", timeout_s=TIMEOUT_S) as client:
        region = client.allocate(SHAPE.nbytes(0))
        assert isinstance(region, SharedRegion)
        client.register(describe(request_id, "1", SHAPE, 0, region))

        def publish(name: str, weights: str) -> str:
            try:
                client.publish(name, Blocks((3, 1), 5).tables(), 20, weights=weights)
            except KvferryError as error:
                return error.code
            return "done"

        yield Weights(client, f"{request_id}/1", lambda *_: None), publish


async def test_what_steps_before_a_change_have_computed_is_refused(
    rank: tuple[Weights, Callable[[str, str], str]],
) -> None:
    weights, publish = rank
    weights.step = 3
    assert publish("before", weights.of(3)) == "done"
    with weights.replacing():
        assert publish("of no name", "") == "mixed_weights"
    unknown = weights.of(4)
    assert publish("old", weights.of(3)) == "mixed_weights"
    assert publish("new", unknown) == "done"
    weights.rename("v2")
    assert publish("by its old name", unknown) == "mixed_weights"
    assert (weights.of(4), publish("by its name", weights.of(4))) == ("v2", "done")
    weights.step = 5
    with weights.replacing():
        pass
    assert weights.of(6) not in (unknown, "v2")  # each change whose weights have no name makes one
    assert publish("since the change before", weights.of(5)) == "mixed_weights"


def written(folder: Path, bias: bytes) -> Path:
    """A checkpoint of one large tensor and a small one."""
    tensors = {"large": bytes(4 << 20), "bias": bias}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, content in tensors.items():
        shape, end = [len(content)], end + len(content)
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [end - len(content), end]}
    folder.mkdir()
    text = json.dumps(header).encode()
    content = b"".join([len(text).to_bytes(8, "little"), text, *tensors.values(), bytes(8192)])
    (folder / "model.safetensors").write_bytes(content)
    return folder


def name_of(folder: Path) -> str:
    return checkpoint_name({}, "bfloat16", None, name=str(folder), revision=None)


def fingerprint_of(name: str, kept_in: str | None = None) -> str:
    return model_fingerprint({}, "bfloat16", None, name=name, revision=None, kept_in=kept_in)


def test_checkpoints_that_differ_in_a_small_tensor_have_two_names(tmp_path: Path) -> None:
    first, second, same = (
        written(tmp_path / name, bias) for name, bias in (("first", b"1234"), ("second", b"1235"), ("same", b"1234"))
    )
    assert name_of(first) == name_of(same) != name_of(second)
    assert fingerprint_of(str(first)) == fingerprint_of(str(same)) != fingerprint_of(str(second))


def test_a_name_of_a_hub_stands_for_what_was_downloaded(tmp_path: Path) -> None:
    """Its main branch is another checkpoint on another day."""
    named = {}
    for day, content in (("monday", b"1234"), ("tuesday", b"1235"), ("the same day", b"1234")):
        copy = tmp_path / day / "models--organisation--model"
        for part in ("refs", "snapshots"):
            (copy / part).mkdir(parents=True)
        (copy / "refs" / "main").write_text(f"{content.hex():0>40}")
        written(copy / "snapshots" / f"{content.hex():0>40}", content)
        named[day] = fingerprint_of("organisation/model", str(tmp_path / day))
    local = written(tmp_path / "local", b"1234")
    assert named["monday"] == named["the same day"] == fingerprint_of(str(local)) != named["tuesday"]
    assert fingerprint_of("organisation/model", str(tmp_path / "nothing")) not in named.values()
    index = {"weight_map": {"a": "model.safetensors", "b": "not-downloaded.safetensors"}}
    (copy / "snapshots" / f"{content.hex():0>40}" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint_of("organisation/model", str(tmp_path / "the same day")) not in named.values()


def test_a_checkpoint_in_a_format_of_its_own_has_a_name(tmp_path: Path) -> None:
    """Mistral's: neither an index nor a file of the usual name."""
    first, second = written(tmp_path / "first", b"1234"), written(tmp_path / "second", b"1235")
    for folder in (first, second):
        (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert fingerprint_of(str(first)) != fingerprint_of(str(second))


def test_keys_that_are_turned_for_long_contexts_are_of_another_model() -> None:
    """The configuration has both factors, and the length of a request decides. Older ones name them otherwise."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    older = {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}
    by_kind = {"rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}}
    for config in ({"rope_parameters": rope}, older, by_kind):
        assert [turned(config, longest, "long") for longest in (64, 65)] == [{}, {"longrope": "long"}]
    for config in ({}, {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}):
        assert turned(config, 65, "long") == {}


def test_a_checkpoint_of_which_nothing_is_known_has_no_name(tmp_path: Path) -> None:
    """Its files may have other content the next time."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"1")
    assert name_of(tmp_path) == name_of(Path("organisation/model")) == ""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(KvferryError, match="safetensors"):
        name_of(tmp_path)


async def test_weights_of_the_first_checkpoint_have_their_first_name_again(
    rank: tuple[Weights, Callable[[str, str], str]],
) -> None:
    weights, _ = rank
    for registered, read, name in (("a", "b", "b"), ("a", "a", ""), ("", "b", "b"), ("a", "", None), ("", "", None)):
        weights.registered = registered
        with weights.replacing():
            pass
        unknown = weights.of(weights.step + 1)
        weights.reloaded(read)
        assert weights.of(weights.step + 1) == (unknown if name is None else name)


def test_an_adapter_that_is_downloaded_when_it_is_loaded_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapters = Adapters()
    before = adapters.digest("a", "organisation/adapter")
    (tmp_path / "organisation" / "adapter").mkdir(parents=True)
    (tmp_path / "organisation" / "adapter" / "adapter_model.safetensors").write_bytes(b"1")
    assert adapters.digest("a", "organisation/adapter") == digest_of_adapter("organisation/adapter") != before


async def test_an_adapter_that_is_loaded_again_with_other_content_is_a_change(
    rank: tuple[Weights, Callable[[str, str], str]], tmp_path: Path
) -> None:
    weights, _ = rank
    digests = []
    for content in (b"1", b"2"):
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        digests.append(digest_of_adapter(str(tmp_path)))
    weights.adapter_loaded("a", digests[0])
    weights.adapter_loaded("b", digests[1])
    weights.adapter_loaded("a", digests[0])
    assert weights.of(0) == ""  # the weights are those that it registered with
    weights.step = 1
    weights.adapter_loaded("a", digests[1])
    other = weights.of(2)
    assert other and weights.of(1) != other
    weights.rename("v2")
    assert weights.of(2) == f"v2{other}"
    weights.adapter_loaded("a", digests[0])
    assert weights.of(2) == "v2"


@dataclass
class Told:
    """SGLang's answer to a part of an update."""

    success: bool = True


def of_sglang(weights: Weights) -> tuple[Updates, Callable[..., str]]:
    """The updates of these weights; a part of one, and the name of what is computed after it."""
    updates = Updates(weights, SGLANG)

    def part(how: str, version: str | None = None, *, success: bool = True, folder: str = "") -> str:
        def replace() -> Told:
            if version is not None:
                updates.tell(version)
            return Told(success)

        updates.part(how, replace, (lambda: weights.rename(folder)) if folder else None)
        weights.step += 1
        return weights.of(weights.step)

    return updates, part


async def test_a_version_names_the_weights_when_all_of_its_session_is_there(
    rank: tuple[Weights, Callable[[str, str], str]],
) -> None:
    """In between they are a mixture, which no other engine has a name for."""
    weights, _ = rank
    updates, part = of_sglang(weights)
    names = [part("begin_weight_update"), part("update_weights_from_tensor", "v2")]
    updates.tell("v2")  # with a call of its own
    names += [weights.of(weights.step), part("update_weights_from_distributed", "v2")]
    assert "v2" not in names and "" not in names
    assert part("end_weight_update") == "v2"
    updates.tell("v3")
    assert weights.of(weights.step) == "v3"
    assert part("update_weights_from_ipc", "v4") == "v4"
    assert part("update_weights_from_disk", folder="digest") == "digest"


@pytest.mark.parametrize("how", ["update_weights_from_tensor", "end_weight_update"])
async def test_a_session_of_which_a_part_has_failed_leaves_no_name(
    rank: tuple[Weights, Callable[[str, str], str]], how: str
) -> None:
    weights, _ = rank
    _, part = of_sglang(weights)
    part("begin_weight_update")
    part("update_weights_from_tensor", "v2")
    broken = part(how, success=False)
    assert "v2" not in (broken, part("update_weights_from_tensor", "v2"), part("end_weight_update"))
    part("begin_weight_update")
    part("update_weights_from_tensor", "v2", success=False)  # the weights are there, and the cache was not flushed
    assert part("end_weight_update") == "v2"
    assert part("check_weights") not in ("v2", broken)  # random ones


async def test_a_reader_of_what_is_refused_does_not_wait(engines: Pair, request_id: str) -> None:
    """Neither one that is there before, nor one that comes later."""
    source, blocks = engines.prefill.source(), engines.decode.take(TOKENS)
    receiving = asyncio.create_task(engines.decode.outcomes(request_id, blocks, source=source))
    await until(lambda: waits_for(engines.routers[0], request_id, Awaited.PUBLISH), "its publish is awaited")
    await replace(engines.prefill, "B")
    await replace(engines.prefill, "")
    pages = engines.prefill.take(TOKENS)
    for name in (request_id, f"{request_id}-later"):
        number = engines.prefill.next_lease()
        for each in engines.prefill.ranks:
            with pytest.raises(KvferryError, match="computed"):
                await each.client.publish(name, pages.tables(), TOKENS, weights="B", lease=number)
    assert {getattr(outcome, "code", "") for outcome in await receiving} & {"mixed_weights"}
    later = await engines.decode.outcomes(f"{request_id}-later", blocks, source=source)
    assert "mixed_weights" in {getattr(outcome, "code", "") for outcome in later}
