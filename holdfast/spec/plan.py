"""The plan: how a run is computed, as opposed to which model it computes.

The run id names a model. The plan names the layout, the machine and the software that compute it. The last bits of a
sum depend on all of them, so every attempt and every checkpoint records its plan. A run that promises bits continues
under a different plan only with `--replan`, which starts a new segment of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from pydantic import BaseModel

from holdfast.spec.errors import PlanChangedError
from holdfast.spec.identity import digest, fields_of
from holdfast.spec.parallel import Parallel
from holdfast.spec.training import Training

Value = str | int | float | bool | None
MISSING = "not set"


class Plan(BaseModel, extra="forbid", frozen=True):
    """How one gang computes, as two tables of names and values."""

    settings: dict[str, Value]  # fields of the spec that are part of the plan, such as parallel.strategy
    surroundings: dict[str, Value]  # measured: device, image, versions, CPU capability, environment
    free: tuple[str, ...] = ()  # settings that change no bits: recorded, but not compared

    @property
    def fingerprint(self) -> str:
        """A digest of everything that changes bits. Attempts with the same fingerprint compute the same bits."""
        body = self.model_dump(mode="json")
        body["settings"] = {name: value for name, value in body["settings"].items() if name not in self.free}
        return digest(body)

    @property
    def summary(self) -> str:
        """The plan in one line: "ddp, 2 processes on 1 node, cpu"."""
        processes, nodes = self.settings["parallel.processes"], self.settings["cluster.nodes"]
        degrees = {
            name: self.settings.get(f"parallel.{name}", 1)
            for name in ("replicas", "tensor", "pipeline", "context", "expert")
        }
        several = "".join(f", {name} {degree}" for name, degree in degrees.items() if degree != 1)
        return (
            f"{self.settings['parallel.strategy']}{several}, {processes} process{'es' if processes != 1 else ''} on "
            f"{nodes} node{'s' if nodes != 1 else ''}, {self.settings['cluster.accelerator']}, torch "
            f"{self.surroundings.get('version of torch', 'unknown')}"
        )

    def differences(self, other: Plan, here: str = "before", there: str = "now") -> list[str]:
        """The differences from `other`, as text: "parallel.strategy: ddp before, fsdp now"."""
        settings = _differences(self.settings, other.settings, here, there, self.free)
        return settings + _differences(self.surroundings, other.surroundings, here, there)


class Segment(BaseModel, extra="forbid", frozen=True):
    """Consecutive steps of a run under one plan: from a step to the next segment, or to the end."""

    from_step: int  # number of steps before it
    attempt: int  # the attempt that started it
    fingerprint: str
    plan: Plan


def settings_of(training: Training, parallel: Parallel, accelerator: str, nodes: int) -> dict[str, Value]:
    """The fields of a spec that are part of the plan, by their dotted names. `nodes` is the actual number of nodes.
    Stages and an offload path are left out if they are not set, so plans of older runs stay valid."""
    layout = fields_of(parallel, "plan")
    if (stages := layout.pop("stages")) is not None:
        layout["stages"] = ", ".join(map(str, stages))
    if layout.pop("offload_path") is not None:  # using a disk changes the order of a sum; the path changes nothing
        layout["offload_path"] = "a disk"
    return {
        **{f"training.{name}": value for name, value in fields_of(training, "plan").items()},
        **{f"parallel.{name}": value for name, value in layout.items()},
        "cluster.accelerator": accelerator,
        "cluster.nodes": nodes,
    }


def stages_of(settings: Mapping[str, Value]) -> tuple[int, ...] | None:
    """The layers of each stage in the settings of a plan. None if they have no stages."""
    stages = settings.get("parallel.stages")
    return None if stages is None else tuple(map(int, str(stages).split(", ")))


def free_under(determinism: str) -> tuple[str, ...]:
    """The settings of a plan that change no bits at a determinism level. `elastic` leaves the number of ranks free."""
    return ("parallel.processes", "cluster.nodes") if determinism == "elastic" else ()


def changes_in_words(segments: Sequence[Segment]) -> list[list[str]]:
    """The changes of each segment from the one before it. The first one has no changes."""
    changes: list[list[str]] = [[] for _ in segments[:1]]
    return changes + [before.plan.differences(now.plan) for before, now in pairwise(segments)]


def continued(segments: Sequence[Segment], step: int, attempt: int, plan: Plan) -> tuple[Segment, ...]:
    """The segments of a run that continues from `step` under `plan`."""
    if segments and segments[-1].fingerprint == plan.fingerprint:
        return tuple(segments)
    return (*segments, Segment(from_step=step, attempt=attempt, fingerprint=plan.fingerprint, plan=plan))


def require_plan(segments: Sequence[Segment], plan: Plan, determinism: str, replan: bool) -> list[str]:
    """The changes of `plan` from the newest of a run's `segments`, as text. Raises PlanChangedError if there are
    changes, the run promises bits, and `replan` is false."""
    if not segments or segments[-1].fingerprint == plan.fingerprint:
        return []
    last = segments[-1]
    changes = last.plan.differences(plan)
    if determinism != "off" and not replan:
        raise PlanChangedError(
            f"the plan differs from the plan of the run since step {last.from_step}, and training.determinism: "
            f"{determinism} promises bits: {'; '.join(changes)}. Restore the former plan, or use --replan to continue "
            "under the new plan and record it"
        )
    return changes


def _differences(
    one: Mapping[str, Value], other: Mapping[str, Value], here: str, there: str, free: Sequence[str] = ()
) -> list[str]:
    return [
        f"{name}: {_shown(one.get(name, MISSING))} {here}, {_shown(other.get(name, MISSING))} {there}"
        for name in {**one, **other}
        if name not in free and one.get(name, MISSING) != other.get(name, MISSING)
    ]


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)
