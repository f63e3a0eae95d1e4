"""What the daemon refuses at its start because this version cannot do it."""

from __future__ import annotations

import pytest

from kvferry.errors import KvferryError
from kvferryd.config import resolve


@pytest.mark.parametrize("settings", [{"way": "staged"}, {"strict": True}, {"strict": True, "way": "staged"}])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_staging_needs_an_arena(device: str, settings: dict[str, object]) -> None:
    with pytest.raises(KvferryError) as refused:
        resolve({"device": device, "arena_mb": 0, **settings}, {})[0]
    assert (refused.value.code, refused.value.field) == ("bad_config", "arena_mb")


@pytest.mark.parametrize("way", ["direct", "mapped"])
def test_strict_leaves_nothing_to_be_read_directly(way: str) -> None:
    with pytest.raises(KvferryError) as refused:
        resolve({"strict": True, "way": way}, {})[0]
    assert (refused.value.code, refused.value.field) == ("bad_config", "way")
