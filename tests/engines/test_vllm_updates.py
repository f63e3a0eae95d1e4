"""A version of vLLM's weights names them when the update that it was told in has ended."""

from __future__ import annotations

import pytest

from engines import told_by

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
NAMES = {
    "told inside": ["-", "-", "-", "-", "v2"],
    "told after it": ["-", "-", "-", "v2"],
    "never told": ["-", "-", "-"],
    "broken": ["-", "-"],
    "whole after a broken one": ["-", "-", "-", "-", "-", "-", "v2"],
    "by the caller itself": ["mine", "-", "-", "-", "-", "mine"],
    "told without one": ["v2"],
}


def test_a_version_that_is_told_inside_an_update_names_no_mixture() -> None:
    assert told_by("weight_updates.py") == NAMES
