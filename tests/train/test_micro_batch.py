"""`training.micro_batch: auto`: the trial, its record, and the run that follows."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.collectives import Gang
from holdfast.components.train import run
from holdfast.dataset import Dataset
from holdfast.engines.assignment import Assignment
from holdfast.launch.exits import LaunchExit
from holdfast.launch.launches import claim_launch, newest_launch, record_exit
from holdfast.launch.micro_batch import (
    MicroBatchChoice,
    begin_candidate,
    find_choice,
    layout_key,
    record_choice,
    with_recorded_micro_batch,
)
from holdfast.pipelines.cli import app
from holdfast.pipelines.view import report
from holdfast.pipelines.view.run_record import read_run
from holdfast.planning.auto import micro_batch_candidates, with_micro_batch
from holdfast.rank.measure import micro_batch
from holdfast.rank.measure.micro_batch import choose_micro_batch, fastest
from holdfast.spec import ExitCode, Spec, SpecError, dump_spec, parse_spec, run_id
from holdfast.store import Store
from holdfast.telemetry.run_metadata import write_run_metadata
from tests.faults.killing import Deed, outcome, train_through
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_spec

AUTO = "training.micro_batch=auto"
CPU = torch.device("cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return new_store(tmp_path / "store")


def key_of(spec: Spec) -> str:
    return layout_key(spec.training, spec.parallel, spec.cluster.accelerator, spec.cluster.nodes.max)


def try_sizes(spec: Spec, store: Store, tmp_path: Path, *sizes: int, launch: int = 1) -> MicroBatchChoice:
    """Run a trial on one rank in this process."""
    trial = Assignment.of(with_micro_batch(spec, sizes[0]), run_id(spec, DATASET_ID), DATASET_ID)
    dataset = Dataset.open(store, DATASET_ID, tmp_path / "cache")
    assignment = trial.model_copy(update={"micro_batch_candidates": sizes})
    return choose_micro_batch(assignment, dataset, CPU, Gang(), store, launch)


def test_auto_is_a_flag_and_the_smallest_number_and_survives_a_dump() -> None:
    spec = tiny_spec(AUTO)
    assert (spec.training.micro_batch, spec.training.auto_micro_batch) == (1, True)
    assert parse_spec(dump_spec(spec)) == spec == tiny_spec("training={auto_micro_batch: true, " + rest_of_training())
    assert run_id(spec, DATASET_ID) == run_id(tiny_spec(), DATASET_ID)


def rest_of_training() -> str:
    fields = tiny_spec().training.model_dump(mode="json", exclude_unset=True)
    return ", ".join(f"{name}: {value}" for name, value in fields.items() if name != "micro_batch") + "}"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("training.determinism=elastic", "write a number, or use training.determinism: exact"),
        ("parallel.auto=true", "remove it, or give the layout yourself"),
        ("parallel.strategy=zero1", "write a number, or use parallel.strategy: fsdp"),
        ("training.auto_micro_batch=true", "write micro_batch: auto"),
    ],
)
def test_auto_is_refused_where_the_number_is_not_free(override: str, remedy: str) -> None:
    given = "training.micro_batch=4" if "auto_micro" in override else AUTO
    with pytest.raises(SpecError, match=rf"(?s)training\.micro_batch: .*{remedy}"):
        tiny_spec(given, override)


def test_the_candidates_divide_the_batch_and_fit_by_the_planners_count() -> None:
    large = ("training.global_batch=96", "model.layers=32", "model.hidden=4096", "model.heads=32", "model.context=4096")
    gpu = ("cluster.accelerator=nvidia", "cluster.product=H100", "training.precision=bf16", "parallel.strategy=fsdp")
    assert micro_batch_candidates(tiny_spec(AUTO), VOCABULARY, here=False) == (1, 2, 4, 8)
    assert micro_batch_candidates(tiny_spec(AUTO, "parallel.processes=2"), VOCABULARY, here=False) == (1, 2, 4)
    shape = (
        *large,
        *gpu,
        "parallel.processes=8",
        "cluster.nodes.min=2",
        "cluster.nodes.max=2",
        "training.global_batch=512",
    )
    sizes = micro_batch_candidates(tiny_spec(AUTO, *shape), VOCABULARY, here=False)
    assert sizes[0] == 1 and max(sizes) < 32  # 32 sequences are left for a rank


def test_the_fastest_is_chosen_and_of_equally_fast_ones_the_largest() -> None:
    assert fastest({1: 3.0, 2: 1.0, 4: 1.015, 8: 1.05}) == 4


@pytest.mark.slow
def test_a_trial_measures_records_its_choice_once_and_leaves_no_marks(store: Store, tmp_path: Path) -> None:
    spec = tiny_spec(AUTO)
    identity = run_id(spec, DATASET_ID)
    assert with_recorded_micro_batch(spec, identity, store) is None
    choice = try_sizes(spec, store, tmp_path, 1, 2)
    assert choice.micro_batch == fastest(choice.seconds)
    assert find_choice(store, identity, spec) == choice
    assert [info.key for info in store.list(f"runs/{identity}/micro_batch/")] == [
        f"runs/{identity}/micro_batch/{key_of(spec)}.json"
    ]
    later = record_choice(store, identity, key_of(spec), MicroBatchChoice(micro_batch=8, seconds={8: 1.0}))
    assert later == choice
    assert with_recorded_micro_batch(spec, identity, store) == with_micro_batch(spec, choice.micro_batch)
    assert with_recorded_micro_batch(tiny_spec(AUTO, "parallel.processes=2"), identity, store) is None


@pytest.mark.slow
def test_a_candidate_without_memory_ends_the_trial_and_not_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = micro_batch._measure

    def scarce(spec: Assignment, size: int, *rest: object) -> float:
        if size > limit:
            torch.empty(2**62, dtype=torch.uint8)  # torch's allocator fails
        return measure(spec, size, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(micro_batch, "_measure", scarce)
    limit = 0
    with pytest.raises(RuntimeError, match="can't allocate memory"):  # nothing smaller is left
        try_sizes(tiny_spec(AUTO), store, tmp_path, 1, 2)
    limit = 1
    choice = try_sizes(tiny_spec(AUTO), store, tmp_path, 1, 2, 4)
    assert (choice.micro_batch, choice.unfit, list(choice.seconds)) == (1, 2, [1])


@pytest.mark.parametrize(
    ("code", "again"),
    [(ExitCode.KILLED, False), (None, False), (ExitCode.TERMINATED, True), (ExitCode.PREEMPTED, True)],
)
def test_a_candidate_that_ended_a_launch_is_left_out_unless_the_launch_was_stopped(
    store: Store, code: ExitCode | None, again: bool
) -> None:
    number = claim_launch(store, "run", {})
    assert begin_candidate(store, "run", "key", 4, number)
    if code is not None:
        record_exit(store, "run", number, LaunchExit(code=code))
    assert begin_candidate(store, "run", "key", 4, number + 1) == again


def test_a_trial_continues_after_a_killed_one_without_the_candidate_that_killed_it(
    store: Store, tmp_path: Path
) -> None:
    spec = tiny_spec(AUTO)
    for size in (1, 2):  # the smallest one is always tried
        begin_candidate(store, run_id(spec, DATASET_ID), key_of(spec), size, 1)
    choice = try_sizes(spec, store, tmp_path, 1, 2, 4, launch=2)
    assert (choice.micro_batch, choice.unfit) == (1, 2)


def test_validate_and_show_name_auto_the_candidates_and_the_choice(store: Store, tmp_path: Path) -> None:
    spec = tiny_spec(AUTO)
    path, identity = tmp_path / "spec.yaml", run_id(spec, DATASET_ID)
    path.write_text(dump_spec(spec))
    lines = CliRunner().invoke(app, ["validate", str(path)]).output
    assert "training.micro_batch: auto, by a trial of 1, 2, 4, 8 before the first step" in lines
    write_run_metadata(store, identity, spec, DATASET_ID, "")
    assert ("micro-batch", "auto: no trial yet") in facts(store, identity)
    choice = MicroBatchChoice(micro_batch=2, seconds={1: 0.5, 2: 0.25}, unfit=4)
    record_choice(store, identity, key_of(spec), choice)
    shown = "auto: 2 by trial (a step with 1: 0.5 s, 2: 0.25 s; 4 does not fit)"
    assert ("micro-batch", shown) in facts(store, identity)


def facts(store: Store, identity: str) -> list[tuple[str, str]]:
    record = read_run(store, identity)
    assert record is not None
    return list(report._facts(record, store, []))


def batch_of_run(store: Store, identity: str, number: int) -> tuple[object, ...]:
    from holdfast.api.run_handle import Run

    return Run(identity, store).batch(1, number).rows


@pytest.mark.slow
def test_a_killed_run_has_the_bits_of_a_run_with_the_chosen_number(store: Store, tmp_path: Path) -> None:
    spec = tiny_spec(AUTO, "parallel.processes=2")
    train_through(spec, store, tmp_path / "home", [Deed("rank1", None, 0.0), Deed("rank0", 4, 0.0)])
    identity = run_id(spec, DATASET_ID)
    choice = find_choice(store, identity, spec)
    assert choice is not None and choice.micro_batch in (1, 2, 4)
    assert newest_launch(store, identity) >= 2
    last = 8 // choice.micro_batch - 1  # the number of the last micro-batch of a step
    assert len(batch_of_run(store, identity, last)) == choice.micro_batch
    written = new_store(tmp_path / "written")
    explicit = with_micro_batch(spec, choice.micro_batch)
    run(explicit, DATASET_ID, written)
    assert outcome(store, explicit)[1] == outcome(written, explicit)[1]
