"""A Hugging Face Trainer resumes with the bits of an undisturbed run, in mid-epoch and at the end of an epoch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpoint.ranks import in_ranks
from tests.script.launched import ask_to_leave, digest_of_run, run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripts" / "transformers"
STEPS, STEPS_OF_EPOCH = 7, 4


@pytest.mark.slow  # transformers is imported
def test_a_trainer_that_leaves_and_resumes_has_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    [(calm, resumed)] = in_ranks(1, _runs, f"file://{tmp_path / 'store'}")
    assert calm[0] == STEPS
    assert resumed == [calm, calm]


def _runs(rank: int, size: int, url: str) -> tuple[tuple[int, str], list[tuple[int, str]]]:
    sys.path.insert(0, str(EXAMPLE))
    run_script(url, "calm", _train, 0)
    resumed = []
    for stop in (STEPS_OF_EPOCH, STEPS_OF_EPOCH + 1):
        assert not run_script(url, f"stopped-{stop}", _train, stop)
        assert digest_of_run(url, f"stopped-{stop}")[0] == stop
        assert run_script(url, f"stopped-{stop}", _train, 0)
        resumed.append(digest_of_run(url, f"stopped-{stop}"))
    return digest_of_run(url, "calm"), resumed


def _train(stop: int) -> None:
    """Train as the example does, and ask to leave one step before `stop`, after which all ranks agree."""
    from mine import Sequences, masked, tiny_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import holdfast.integrations.transformers as hold

    class Stop(TrainerCallback):
        def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step == stop - 2:
                ask_to_leave()

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
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), data_collator=masked, callbacks=[Stop()])
    hold.train(trainer)
