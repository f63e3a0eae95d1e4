"""The digest of a prompt is a contract: other engines compute it from docs/engines.md alone. So is a request's name."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvferry.digest import prompt_digest
from kvferry.handoff import Handoff, lease_name
from kvferry.schemas import MAX_REQUEST_ID
from support import refused


def test_the_digest_is_the_documented_bytes() -> None:
    said = b"kvferry/prompt/1\0" + struct.pack("<Qqqq", 3, 7, 0, 151_643)
    assert prompt_digest([7, 0, 151_643]) == hashlib.sha256(said).digest()
    extra = b"lora=summaries \xc3\xa4"
    assert prompt_digest([7, 0, 151_643], ["lora=summaries ä"]) == (
        hashlib.sha256(said + struct.pack("<Q", len(extra)) + extra).digest()
    )
    assert prompt_digest([1, 2]).hex() == "861fa0ad5ca7311e4ece4ab9d8a269e427a221e5db0a3d432ad547de74a39fcc"


def test_half_a_character_has_a_digest_of_its_own() -> None:
    halves = [prompt_digest([1], [f"lora={half}"]) for half in ("\ud800", "\udc80", "?")]
    assert len(set(halves)) == len(halves)


def test_no_two_of_these_share_a_digest() -> None:
    several = [
        prompt_digest([]), prompt_digest([0]), prompt_digest([0, 0]), prompt_digest([1, 2]), prompt_digest([2, 1]),
        prompt_digest([1 | 2 << 32]), prompt_digest([1, 2], [""]), prompt_digest([1, 2], ["a", "b"]),
        prompt_digest([1, 2], ["b", "a"]), prompt_digest([1, 2], ["ab"]), prompt_digest([1], ["\2"]),
    ]  # fmt: skip
    assert len(set(several)) == len(several)


def test_more_tokens_than_the_prompt_has_are_those_of_another() -> None:
    handoff = Handoff.parse({"do_remote_prefill": True, "order": "router", "remote_num_tokens": 9})
    with refused("other_prompt", field="kv_transfer_params.remote_num_tokens"):
        handoff.origin("r", 8, lambda num_tokens: pytest.fail("there is nothing to compare"))


def test_the_digest_is_of_the_tokens_that_are_named() -> None:
    tokens = [5, 6, 7, 8]
    handoff = Handoff.parse({"do_remote_prefill": True, "order": "router", "remote_num_tokens": 3})
    origin = handoff.origin("r", len(tokens), lambda num_tokens: prompt_digest(tokens[:num_tokens]))
    assert origin is not None
    assert origin.digest == prompt_digest([5, 6, 7])


# ---- the name of a request at its daemons, made of an id that comes from a client's header ----


@pytest.mark.parametrize("request_id", ["a", "cmpl-ü-0-1234abcd", "i" * MAX_REQUEST_ID])
def test_an_id_that_daemons_take_is_the_name(request_id: str) -> None:
    assert lease_name(request_id) == request_id


@pytest.mark.parametrize("request_id", ["i" * (MAX_REQUEST_ID + 1), "ü" * 5000, "\ud800", "i\udfff" * 300])
def test_any_other_gets_one_of_its_own(request_id: str) -> None:
    name = lease_name(request_id)
    assert name == lease_name(request_id)
    assert 0 < len(name.encode().decode()) <= MAX_REQUEST_ID
    assert name != lease_name(request_id + "x")
