"""`parallel: auto` in a run: planned at the start, and afterwards taken from the run's record."""

from pathlib import Path

import pytest

from holdfast.checkpoint import newest_segments
from holdfast.components.train import run
from holdfast.components.train.auto_layout import resolve_layout
from holdfast.engines.assignment import Assignment
from holdfast.launch.exits import LaunchExit
from holdfast.launch.launches import claim_launch, read_exits, record_exit
from holdfast.planning import calibration
from holdfast.planning.auto import with_fields
from holdfast.spec import ExitCode, HoldfastError, Spec, SpecError, run_id
from tests.planning.test_calibration import measured
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_spec

AUTO = ("parallel.auto=true", "training.micro_batch=8", "training.steps=4")
ROOMY, TIGHT = 4e9, 7e5  # bytes per rank: enough to keep all activations, or so few that they are recomputed


def machine(memory: float) -> None:
    """Give this machine's ranks a memory size and no other properties."""
    calibration.write(measured(memory=memory, ranks=1), calibration.default_path())


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    machine(ROOMY)


def planned(spec: Spec, store, *, replan: bool = False) -> Spec:  # type: ignore[no-untyped-def]
    return resolve_layout(spec, run_id(spec, DATASET_ID), store, VOCABULARY, replan=replan)


def test_a_spec_with_a_layout_is_left_alone(tmp_path: Path) -> None:
    spec = tiny_spec()
    assert planned(spec, new_store(tmp_path / "store")) is spec


def test_a_launch_that_saved_nothing_has_recorded_its_layout_and_replan_plans_anew(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*AUTO)
    first = planned(spec, store)
    assert first.training.activation_checkpointing == "none"
    machine(TIGHT)
    assert planned(spec, store).training.activation_checkpointing == "full"  # nothing is recorded yet
    identity = run_id(spec, DATASET_ID)
    claim_launch(store, identity, Assignment.of(first, identity, DATASET_ID).model_dump(mode="json"))
    assert planned(spec, store) == first
    assert planned(spec, store, replan=True).training.activation_checkpointing == "full"


def test_another_number_of_ranks_is_replanned_without_bit_determinism(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    for determinism, checkpointing in (("off", "none"), ("exact", "selective")):
        spec = tiny_spec(*AUTO, f"training.determinism={determinism}")
        first = with_fields(planned(spec, store), {"training.activation_checkpointing": "selective"})
        identity = run_id(spec, DATASET_ID)
        claim_launch(store, identity, Assignment.of(first, identity, DATASET_ID).model_dump(mode="json"))
        two = tiny_spec(*AUTO, f"training.determinism={determinism}", "parallel.processes=2")
        assert planned(two, store).training.activation_checkpointing == checkpointing


def test_a_recorded_layout_that_no_longer_fits_the_spec_is_refused_with_a_remedy(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*AUTO)
    identity, first = run_id(spec, DATASET_ID), planned(spec, store)
    claim_launch(store, identity, Assignment.of(first, identity, DATASET_ID).model_dump(mode="json"))
    more = tiny_spec(*AUTO, "parallel.processes=4")  # 8 sequences are not four micro-batches of 4
    assert run_id(more, DATASET_ID) == identity
    with pytest.raises(SpecError, match=r"(?s)parallel.auto.*micro_batch: 4.*--replan"):
        planned(more, store)
    anew = planned(more, store, replan=True)
    assert anew.accumulation * anew.training.micro_batch * anew.data_parallel_size == 8


@pytest.mark.slow
def test_a_run_records_what_was_planned_and_keeps_it(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*AUTO)
    first = planned(spec, store)
    trained = run(spec, DATASET_ID, store)
    (segment,) = newest_segments(store, trained.run_id)
    assert segment.plan.settings["training.micro_batch"] == first.training.micro_batch == 4
    assert trained.run_id == run_id(first, DATASET_ID)
    machine(TIGHT)
    assert planned(spec, store) == first


def test_the_next_plan_is_used_after_an_out_of_memory_launch(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec(*AUTO)
    identity, first = run_id(spec, DATASET_ID), planned(spec, store)
    assignment = Assignment.of(first, identity, DATASET_ID).model_dump(mode="json")
    number = claim_launch(store, identity, assignment)
    record_exit(
        store,
        identity,
        number,
        LaunchExit.model_validate(
            {"code": 20, "ran_out": True, "next_plan": {"training.activation_checkpointing": "full"}}
        ),
    )
    second = planned(spec, store)
    assert second.training.activation_checkpointing == "full"
    assert second.training.micro_batch == first.training.micro_batch
    number = claim_launch(store, identity, assignment)
    record_exit(store, identity, number, LaunchExit.model_validate({"code": 20, "ran_out": True, "next_plan": None}))
    with pytest.raises(SpecError, match=r"ran out of memory in launch 2.*(?s:.)*more ranks"):
        planned(spec, store)


@pytest.mark.slow
def test_ranks_that_run_out_of_memory_end_with_a_code_and_the_plan_that_follows(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    calibration.default_path().unlink()  # the memory size is unknown
    # The matrices exceed any address space, so the attempt fills no machine's memory.
    wide = ("model.hidden=1000000", "model.ffn=10000000", "model.heads=1000", "model.kv_heads=1000", "model.layers=4")
    spec = tiny_spec(*wide, "parallel.processes=2", "training.micro_batch=4")
    with pytest.raises(HoldfastError, match=r"next plan that fits .*add to the command: --set .* --replan") as error:
        run(spec, DATASET_ID, store)
    assert error.value.exit_code == ExitCode.OUT_OF_MEMORY
    (ending,) = read_exits(store, run_id(spec, DATASET_ID)).values()
    assert ending.code == ExitCode.OUT_OF_MEMORY
    assert ending.next_plan is not None
    next_spec = tiny_spec(
        *wide, "parallel.processes=2", *(f"{name}={value}" for name, value in ending.next_plan.items())
    )
    assert run_id(next_spec, DATASET_ID) == run_id(spec, DATASET_ID)
