"""A Hugging Face Trainer resumes with the bits of an undisturbed run, in mid-epoch and at the end of an epoch."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.ranks import in_ranks
from tests.script.launched import ask_to_leave, digest_of_run, run_script
from tests.telemetry.trainer_server import trainer_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripts" / "transformers"
STEPS, STEPS_OF_EPOCH = 7, 4


@pytest.mark.slow  # transformers is imported
def test_a_trainer_that_leaves_and_resumes_has_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    [(calm, stopped)] = in_ranks(1, _runs, f"file://{tmp_path / 'store'}", tmp_path)
    assert calm[0][0] == STEPS
    assert calm[1] == [STEPS, 10 * STEPS]
    assert stopped == calm


def _runs(rank: int, size: int, url: str, folder: Path) -> list[tuple[tuple[int, str], list[int]]]:
    """The digest of a run and the totals of its callbacks: without a stop, and with one at the end of an epoch and one
    within an epoch."""
    sys.path.insert(0, str(EXAMPLE))
    results = []
    for run, stops in (("calm", ()), ("stopped", (STEPS_OF_EPOCH, STEPS_OF_EPOCH + 2))):
        for stop in stops:
            assert not run_script(url, run, _train, stop, [])
            assert digest_of_run(url, run)[0] == stop
        totals: list[int] = []
        with trainer_server(folder) as server:  # Trainer adds its own callback in the pods of a TrainJob
            assert run_script(url, run, _train, 0, totals)
        last = server.bodies[-1]["trainerStatus"]
        assert last["progressPercentage"] == 100
        assert "train_loss" in {one["name"] for one in last["metrics"]}
        results.append((digest_of_run(url, run), totals))
    return results


def _train(stop: int, totals: list[int]) -> None:
    """Train as the example does, and ask to leave one step before `stop`, after which all ranks agree."""
    from mine import Sequences, masked, tiny_model  # type: ignore[import-not-found]
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    import holdfast.integrations.transformers as hold

    class Stop(TrainerCallback):
        def on_step_begin(self, args: object, state: Any, control: object, **_: object) -> None:
            if state.global_step == stop - 2:
                ask_to_leave()

    class Counting(TrainerCallback, ExportableState):
        def __init__(self, by: int) -> None:
            self.by, self.total = by, 0

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            self.total += self.by

        def state(self) -> dict[str, object]:
            return {"args": {"by": self.by}, "attributes": {"total": self.total}}

    arguments = TrainingArguments(
        "unused",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        seed=7,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = tiny_model()
    counting = [Counting(1), Counting(10)]  # two of one class have a state each
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Sequences(),
        data_collator=masked,
        callbacks=[Stop(), *counting],
    )
    hold.train(trainer)
    totals.extend(one.total for one in counting)
