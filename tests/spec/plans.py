"""Plans for tests."""

from typing import Any

from holdfast.spec import parse_spec
from holdfast.spec.plan import Plan, continued, settings_of


def plan_of(*overrides: str, **surroundings: str) -> Plan:
    """The plan of a small spec with overrides, in the given `surroundings`."""
    spec = parse_spec("{name: a, data: {sources: [{uri: x}]}}", overrides)
    settings = settings_of(spec.training, spec.parallel, spec.cluster.accelerator, spec.cluster.nodes.max)
    return Plan(settings=settings, surroundings={"version of torch": "2.13.0", **surroundings})


def two_segments() -> list[dict[str, Any]]:
    """The stored segments of a run that moved from DDP to FSDP after step 30."""
    device = "H100"
    segments = continued((), 0, 1, plan_of(device=device))
    segments = continued(segments, 30, 4, plan_of("parallel.strategy=fsdp", device=device))
    return [segment.model_dump(mode="json") for segment in segments]
