"""What transfers took corrects what the next are expected to take."""

from __future__ import annotations

import pytest

from kvferryd.peers.calibration import BOUND, LEAST_S, Calibration


@pytest.mark.parametrize("wrong", [1 / 8, 3.0, 12.0])
def test_a_wrong_constant_heals(wrong: float) -> None:
    calibration, truth_s = Calibration(), 0.1
    for _ in range(40):
        calibration.learn("staged", truth_s * wrong * calibration.factor("staged"), truth_s)
    assert truth_s * wrong * calibration.factor("staged") == pytest.approx(truth_s, rel=0.05)


def test_one_bad_transfer_says_little_and_many_only_so_much() -> None:
    calibration = Calibration()
    calibration.learn("mapped", 0.002, 60.0)
    assert 1 < calibration.factor("mapped") < 1.5
    for _ in range(100):
        calibration.learn("mapped", 0.002, 60.0)
    assert calibration.factor("mapped") == BOUND


def test_a_way_that_is_not_taken_is_given_another_chance() -> None:
    calibration = Calibration()
    for _ in range(10):
        calibration.learn("mapped", 0.002, 0.2)
    before = calibration.factor("mapped")
    for _ in range(200):
        calibration.learn("staged", 0.004, 0.004)
    assert calibration.factor("staged") == pytest.approx(1)
    assert calibration.factor("mapped") < 1.1 < before


def test_nothing_is_learnt_from_what_takes_no_time() -> None:
    calibration = Calibration()
    calibration.learn("direct", LEAST_S / 100, LEAST_S / 2)
    assert calibration.factor("direct") == 1
