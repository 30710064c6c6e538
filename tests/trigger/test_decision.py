"""The limits of a decision, where both outcomes are possible."""

import math

import pytest

from holdfast.components.trigger.decision import Decay, of_age, of_decay


@pytest.mark.parametrize(
    ("now", "due"), [(2.0, False), (2.2, False), (2.3, True), (1.9, False), (math.nan, True), (math.inf, True)]
)
def test_a_champion_has_decayed_when_it_is_worse_than_allowed_or_gives_no_number(now: float, due: bool) -> None:
    decay = Decay(dataset_id="d", bits_per_byte=now, blessed_with=2.0, tokens=100)
    assert of_decay(decay, 0.1 + 1e-9).due is due


@pytest.mark.parametrize(("hours", "due"), [(23.9, False), (24.0, True)])
def test_a_champion_of_the_very_age_that_is_allowed_is_due(hours: float, due: bool) -> None:
    assert of_age(hours, 24.0).due is due
