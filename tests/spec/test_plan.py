"""The plan: differences between plans are explained, and a run that promises bits accepts no other plan by default."""

import pytest

from holdfast.spec import ExitCode, Spec
from holdfast.spec.errors import PlanChangedError
from holdfast.spec.fields import leaves
from holdfast.spec.parallel import Parallel
from holdfast.spec.plan import (
    Plan,
    Segment,
    changes_in_words,
    continued,
    free_under,
    require_plan,
    settings_of,
)
from holdfast.spec.training import Training
from tests.spec.plans import plan_of
from tests.spec.test_identity import other_value


def test_every_field_of_the_plan_is_in_it() -> None:
    found_elsewhere = {"cluster.nodes.max": "cluster.nodes", "cluster.image": None, "cluster.environment": None}
    found_elsewhere["cluster.network"] = None  # through the variables that it sets
    expected = {found_elsewhere.get(leaf.path, leaf.path) for leaf in leaves(Spec) if leaf.role == "plan"} - {None}
    cut = ("parallel.processes=2", "parallel.pipeline=2", "parallel.stages=[1, 3]")
    away = ("parallel.strategy=zero3", "parallel.offload=optimizer", "parallel.offload_path=/one")
    optional = {"parallel.stages", "parallel.offload_path"}  # included only when they are set
    assert plan_of().settings.keys() == expected - optional
    assert plan_of(*cut).settings.keys() | plan_of(*away).settings.keys() == expected


def test_disk_offload_is_in_the_plan_and_its_path_is_not() -> None:
    offload = ("parallel.strategy=zero3", "parallel.offload=optimizer")
    plans = [
        plan_of(*offload, *path) for path in ((), ("parallel.offload_path=/one",), ("parallel.offload_path=/two",))
    ]
    assert plans[0].fingerprint != plans[1].fingerprint == plans[2].fingerprint


LEVELS: dict[str, set[str]] = {"off": set(), "exact": set(), "elastic": {"parallel.processes", "cluster.nodes"}}


@pytest.mark.parametrize("determinism", LEVELS)
def test_the_fingerprint_follows_every_setting_but_those_that_the_level_leaves_free(determinism: str) -> None:
    def plan(changes: dict[str, object], surroundings: dict[str, str]) -> Plan:
        settings = {"parallel.stages": "1, 2", "parallel.offload_path": "a disk", **plan_of().settings, **changes}
        return Plan(settings=settings, surroundings=surroundings, free=free_under(determinism))

    surroundings = {"device": "H100", "version of torch": "2"}
    whole = plan({}, surroundings)
    follows = {name for name in whole.settings if plan({name: "other"}, surroundings).fingerprint != whole.fingerprint}
    assert whole.settings.keys() - follows == LEVELS[determinism]
    differing = {name for name in whole.settings if whole.differences(plan({name: "other"}, surroundings))}
    assert differing == follows  # a refusal gives the reason
    for name in surroundings:
        assert plan({}, {**surroundings, name: "other"}).fingerprint != whole.fingerprint
        assert (
            plan({}, {key: value for key, value in surroundings.items() if key != name}).fingerprint
            != whole.fingerprint
        )


def test_every_field_of_the_plan_changes_its_settings() -> None:
    training, parallel = Training(), Parallel()

    def settings(
        training: Training = training, parallel: Parallel = parallel, kind: str = "cpu", nodes: int = 1
    ) -> str:
        return str(settings_of(training, parallel, kind, nodes))

    changed = [settings(kind="nvidia"), settings(nodes=2)]
    for leaf in (leaf for leaf in leaves(Spec) if leaf.role == "plan" and leaf.section in (Training, Parallel)):
        section = training if leaf.section is Training else parallel
        other = section.model_copy(update={leaf.name: other_value(leaf.info, getattr(section, leaf.name))})
        changed.append(settings(**{leaf.path.split(".")[0]: other}))  # type: ignore[arg-type]
    assert len({settings(), *changed}) == len(changed) + 1 > 15


def test_equal_plans_have_one_fingerprint_and_no_differences() -> None:
    assert plan_of().fingerprint == Plan.model_validate_json(plan_of().model_dump_json()).fingerprint
    assert plan_of().differences(plan_of()) == []


def test_differences_are_reported_with_both_values() -> None:
    now = plan_of("parallel.strategy=fsdp", "training.compile=true", "parallel.processes=2", device="H100")
    assert plan_of(variable="x").differences(now) == [
        "training.compile: false before, true now",
        "parallel.processes: 1 before, 2 now",
        "parallel.strategy: ddp before, fsdp now",
        "variable: x before, not set now",
        "device: not set before, H100 now",
    ]
    assert plan_of().fingerprint != now.fingerprint


def test_a_change_is_a_segment_from_its_step_and_the_same_plan_is_none() -> None:
    first = continued((), 0, 1, plan_of())
    same = continued(first, 30, 2, plan_of())
    assert first == same == (Segment(from_step=0, attempt=1, fingerprint=plan_of().fingerprint, plan=plan_of()),)
    two = continued(same, 60, 3, plan_of("training.micro_batch=4"))
    assert [(segment.from_step, segment.attempt) for segment in two] == [(0, 1), (60, 3)]
    assert changes_in_words(two) == [[], ["training.micro_batch: 8 before, 4 now"]]
    assert changes_in_words(()) == []


@pytest.mark.parametrize("determinism", ["exact", "elastic"])
def test_a_deterministic_run_refuses_another_plan_with_a_message(determinism: str) -> None:
    segments, now = continued((), 30, 1, plan_of()), plan_of("parallel.processes=2", device="H100")
    message = r"since step 30.*parallel.processes: 1 before, 2 now; device: not set before, H100 now.*use --replan"
    with pytest.raises(PlanChangedError, match=message) as error:
        require_plan(segments, now, determinism, replan=False)
    assert error.value.exit_code == ExitCode.PLAN_CHANGED
    assert not error.value.exit_code.retryable


@pytest.mark.parametrize(("determinism", "replan"), [("off", False), ("exact", True)])
def test_a_change_that_is_allowed_is_named_and_the_same_plan_is_none(determinism: str, replan: bool) -> None:
    segments = continued((), 0, 1, plan_of())
    changes = require_plan(segments, plan_of("parallel.processes=2"), determinism, replan)
    assert changes == ["parallel.processes: 1 before, 2 now"]
    assert require_plan(segments, plan_of(), "exact", replan=False) == []
    assert require_plan((), plan_of(), "exact", replan=False) == []
