"""After a kill of any process at any moment, the same command ends with the bits of an undisturbed run."""

import signal
from pathlib import Path

import psutil
import pytest

from holdfast.spec import ExitCode, run_id
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import read_events
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import SaveCommitted
from tests.faults.accounts import require_whole_ledger
from tests.faults.killing import (
    HELD_TRAINING,
    Output,
    followed,
    held_at,
    outcome,
    random_deeds,
    train_through,
    wait_for_victim,
    wait_until_idle,
)
from tests.faults.nodes import PATIENCE
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.seeds import SEEDS
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, new_store, start_training, tiny_spec, train_once, write_dataset

COMMON = (f"training.steps={STEPS}", "parallel.processes=2", "checkpoint.every_steps=7")
LAYOUTS = ("ddp", "fsdp")
BEFORE_THEY_MEET = -1  # see held_worker
pytestmark = pytest.mark.timeout(1000)  # longer than train_through and an undisturbed run may take


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The end of an undisturbed run of each layout."""
    return {strategy: undisturbed_end(tmp_path_factory, strategy) for strategy in LAYOUTS}


def kill_and_compare(seed: int, store: Store, home: Path, undisturbed: dict[str, dict[str, object]]) -> None:
    strategy = LAYOUTS[seed % len(LAYOUTS)]
    spec = tiny_spec(*COMMON, f"parallel.strategy={strategy}")
    write_dataset(store)
    diary = train_through(spec, store, home, random_deeds(seed, STEPS, ranks=2))
    result, end = outcome(store, spec)
    assert end == undisturbed[strategy], diary
    assert result.step == STEPS
    require_whole_ledger(read_events(store, result.run_id), ranks=2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.drill) for seed in range(1, SEEDS))])
def test_kill_9_of_anything_at_any_moment_changes_no_bit(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest, undisturbed: dict[str, dict[str, object]]
) -> None:
    """Four consecutive seeds cover each layout on a folder and on S3."""
    url = request.getfixturevalue("s3_url") if seed % 4 in (1, 2) else f"file://{tmp_path / 'store'}"
    kill_and_compare(seed, open_store(url), tmp_path / "home", undisturbed)


@pytest.mark.drill
def test_kill_9_changes_no_bit_where_the_state_is_offloaded(tmp_path: Path) -> None:
    """For every engine, mesh and offload after a stop: tests/train/test_engines.py, test_mesh.py, test_experts.py."""
    spec = tiny_spec(*COMMON, "parallel.strategy=zero3", "parallel.offload=parameters")
    quiet, struck = new_store(tmp_path / "quiet"), new_store(tmp_path / "struck")
    train_once(spec, quiet.url, tmp_path / "quiet-home")
    diary = train_through(spec, struck, tmp_path / "struck-home", random_deeds(2, STEPS, ranks=2))
    assert outcome(struck, spec)[1] == outcome(quiet, spec)[1], diary


@pytest.mark.slow
def test_a_rank_that_dies_before_the_ranks_have_met_leaves_no_other_waiting(
    tmp_path: Path, undisturbed: dict[str, dict[str, object]]
) -> None:
    spec, store = tiny_spec(*COMMON, "parallel.strategy=ddp"), new_store(tmp_path / "store")
    gate = held_at(BEFORE_THEY_MEET, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        ranks = [wait_for_victim(psutil.Process(process.pid), name) for name in ("rank0", "rank1")]
        wait_until_idle(ranks[0])
        ranks[1].kill()
        gate.hold(STEPS)
        assert process.wait(PATIENCE) == 0
        reader.join()
    (log,) = (tmp_path / "home").glob("logs/*/launch-000001.log")
    assert "SIGTERM" in log.read_text()
    assert "it is killed" not in log.read_text()  # it left without a kill
    assert outcome(store, spec)[1] == undisturbed["ddp"]


@pytest.mark.slow
def test_a_sigterm_before_the_rendezvous_ends_as_terminated_without_a_checkpoint(tmp_path: Path) -> None:
    spec, store = tiny_spec(*COMMON), new_store(tmp_path / "store")
    gate = held_at(BEFORE_THEY_MEET, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        wait_for_victim(psutil.Process(process.pid), "rank0")
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
        reader.join()
    assert code == ExitCode.TERMINATED, "".join(output.lines)
    assert list(store.list(layout.run(run_id(spec, DATASET_ID), "checkpoints/"))) == []


@pytest.mark.slow
def test_the_next_launcher_continues_the_events_of_a_killed_one(tmp_path: Path) -> None:
    spec, store = tiny_spec(*COMMON, "parallel.strategy=ddp"), new_store(tmp_path / "store")
    gate = held_at(10, spec, store, tmp_path / "home")
    process = start_training(spec, store.url, tmp_path / "home", environment=gate.variables, module=HELD_TRAINING)
    output = Output(PipeEvents(tmp_path / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        output.wait_for_step(8)
        expected_kinds = {"step_began", "launch_began", "attempt_began"}
        gate.wait(
            lambda: expected_kinds <= {event.kind for event in read_events(store, run_id(spec, DATASET_ID))},
            "what began so far",
        )
        process.kill()
        process.wait()
        reader.join()
    train_once(spec, store.url, tmp_path / "home")
    events = read_events(store, run_id(spec, DATASET_ID))
    notable = [(event.kind, event.launch, event.attempt) for event in events if event.notable]
    # The number of saves and slow ranks on a busy machine do not matter here.
    assert [event for event in notable if event[0] not in ("save_committed", "straggler_detected")] == [
        ("step_began", None, None),
        ("launch_began", 1, None),
        ("attempt_began", 1, 1),
        ("step_began", None, None),
        ("launch_began", 2, None),
        ("attempt_began", 2, 2),
        ("rank_ended", 2, 2),
        ("launch_ended", 2, None),
        ("step_ended", None, None),
    ]
    saved_steps = [event.step for event in events if isinstance(event, SaveCommitted)]
    assert saved_steps == sorted(set(saved_steps)) and saved_steps[-1] == STEPS
