"""How an execution of the DAG ended.

The records of its own steps decide. The engine's word counts only where they say nothing: KFP tells the exit handler
the state of an ML Metadata execution, Argo the phase of a Workflow, and a verdict shows in neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from holdfast.components.runtime.outcomes import Outcome

Ending = Literal["succeeded", "failed", "cancelled"]

NOT_DUE, NOT_BLESSED = "not_due", "not_blessed"  # how the results begin that end a DAG early, and well
# Argo and Ray, kfp.local, KFP (COMPLETE, CACHED), Slurm (COMPLETED). KFP never says SUCCEEDED here.
_SUCCEEDED = frozenset({"succeeded", "success", "complete", "completed", "cached"})
_CANCELLED = frozenset({"cancelled", "canceled", "cancelling", "canceling", "stopped"})


def ending_of(word: str, outcomes: Iterable[Outcome] = (), *, stopped: bool = False) -> Ending:
    """How the DAG ended. `word`: the engine's, in any case; `outcomes`: those of the steps of this execution;
    `stopped`: whether a person stopped it on this machine."""
    if stopped or word.lower() in _CANCELLED:
        return "cancelled"
    return "succeeded" if word.lower() in _SUCCEEDED or any(_ends_well(one) for one in outcomes) else "failed"


def not_due(outcomes: Iterable[Outcome]) -> str:
    """Why a scheduled execution had nothing to do; empty where it had, or was not scheduled."""
    return next((one.result for one in outcomes if one.step == "trigger" and one.result.startswith(NOT_DUE)), "")


def _ends_well(outcome: Outcome) -> bool:
    """Whether the DAG ends well with this step: nothing after it is left to do."""
    if outcome.exit_code != 0:
        return False
    early = {"trigger": NOT_DUE, "evaluate": NOT_BLESSED}.get(outcome.step)
    return outcome.step == "register" or (early is not None and outcome.result.startswith(early))
