"""What the daemon refuses at its start because this version cannot do it."""

from __future__ import annotations

import pytest

from kvferry.errors import KvferryError
from kvferryd.config import Config
from kvferryd.engines import _stages
from kvferryd.ferry import Ferry
from kvferryd.metrics import Metrics


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"way": "staged"}, "way"), ({"strict": True}, "strict"), ({"strict": True, "way": "staged"}, "strict")],
)
def test_a_daemon_beside_a_gpu_does_not_stage(settings: dict[str, object], field: str) -> None:
    config = Config(device="cuda:0", **settings)  # type: ignore[arg-type]
    with pytest.raises(KvferryError) as refused:
        Ferry(config, Metrics())
    assert (refused.value.code, refused.value.field) == ("bad_config", field)
    assert not _stages(config)


@pytest.mark.parametrize("way", ["direct", "mapped"])
def test_strict_leaves_nothing_to_be_read_directly(way: str) -> None:
    with pytest.raises(KvferryError) as refused:
        Ferry(Config(strict=True, way=way), Metrics())
    assert (refused.value.code, refused.value.field) == ("bad_config", "way")
