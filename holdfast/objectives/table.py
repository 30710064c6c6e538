"""The table of objectives: which data are trained with which objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from holdfast.objectives.interface import Objective, ObjectiveName
from holdfast.objectives.next_token import NextToken
from holdfast.objectives.preference import DirectPreference
from holdfast.spec.training import Training

OBJECTIVE_OF_DATA: Mapping[Literal["text", "chat", "preferences"], ObjectiveName] = {
    "text": "next_token",
    "chat": "next_token",
    "preferences": "dpo",
}


def build_objective(name: ObjectiveName, training: Training) -> Objective:
    """The objective of that name, with the settings of `training`."""
    if name == "dpo":
        return DirectPreference(training.preference.beta)
    return NextToken()
