"""The table of objectives: which data are trained with which objective."""

from collections.abc import Callable

from holdfast.objectives.distillation import TopKDistillation
from holdfast.objectives.interface import Objective
from holdfast.objectives.next_token import NextToken
from holdfast.objectives.own import OwnObjective
from holdfast.objectives.policy import policy_objective
from holdfast.objectives.preference import DirectPreference, OddsRatio, RewardModel
from holdfast.objectives.unpaired import UnpairedPreference
from holdfast.spec.training import ObjectiveName, Training


def build_objective(name: ObjectiveName, training: Training) -> Objective:
    """The objective of that name, with the settings of `training`."""
    if training.objective.is_own:
        return OwnObjective(training.objective)
    settings = training.preference
    builders: dict[ObjectiveName, Callable[[], Objective]] = {
        "next_token": NextToken,
        "distillation": lambda: TopKDistillation(training.distillation.hard_weight),
        "dpo": lambda: DirectPreference(settings.beta),
        "orpo": lambda: OddsRatio(settings.beta),
        "reward": RewardModel,
        "grpo": lambda: policy_objective(training.grpo),
        "kto": lambda: UnpairedPreference(settings.beta, settings.desirable_weight, settings.undesirable_weight),
    }
    return builders[name]()
