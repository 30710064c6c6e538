"""A hundred kills of a run that learns from its own answers: no prompt is lost or repeated, and no bit changes."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.rollouts.records import recorded_steps, records_of_step
from holdfast.spec import Spec
from holdfast.store import Store, open_store
from tests.checkpoint.ranks import in_ranks
from tests.rollouts.prompt_run import FIELDS, prompt_spec, train_with_code, turns_fields, write_prompts
from tests.seeds import SEEDS, in_full
from tests.train.ranks import identity_of, trained

KILLS = int(os.environ.get("HOLDFAST_KILLS", str(10 * SEEDS)))
MOST_CALLS = 12  # before a kill; a step has about four
STEPS = max(8, KILLS * 6 // 5)  # more than all attempts together compute
RUN = (f"training.steps={STEPS}", "checkpoint.every_steps=1", "training.log_every=1000")
VARIANTS = {"updates": ("training.grpo.updates=2",), "older weights": ("training.grpo.lag=1",), "turns": ()}


def _fields(variant: str, folder: Path) -> tuple[str, ...]:
    """The overrides of a variant, which keeps its code in `folder`."""
    return (*RUN, *VARIANTS[variant], *(turns_fields(folder / "code") if variant == "turns" else ()))


def _killed(rank: int, size: int, url: str, folder: Path, fields: tuple[str, ...], seed: int) -> Any:
    """Train as a rank that is killed before or after a random call of a step: a lot, all lots, a record, the update."""
    import holdfast.engines.torch.engine as engine
    from holdfast.rank.answer_batches import AnswerBatches
    from holdfast.rollouts.records import LotRecord

    draw = random.Random(seed)
    left, after = draw.randint(1, MOST_CALLS), draw.random() < 0.5

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            is_last = left == 0  # calls inside this one count, too
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*given, **named)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in ("_lot", "_load", "_logprobs"):
        setattr(AnswerBatches, name, counted(getattr(AnswerBatches, name)))
    LotRecord.dump = counted(LotRecord.dump)  # type: ignore[method-assign]
    engine.update = counted(engine.update)
    return train_with_code(rank, size, url, folder, [((*FIELDS, *fields), "killed", None)], folder.parent / "code")


def places(store: Store, spec: Spec, salt: str = "") -> list[tuple[int, int, int]]:
    """Step, place and number of each prompt that was answered, in order."""
    run = identity_of(spec, salt)
    return [
        (step, unit.place, unit.prompt)
        for step in recorded_steps(store, run)
        for record in records_of_step(store, run, step)
        for unit in record.units
    ]


@pytest.mark.drill
@pytest.mark.parametrize(
    "variant", ["updates", *(pytest.param(name, marks=in_full) for name in VARIANTS if name != "updates")]
)
def test_kills_lose_and_repeat_no_prompt(tmp_path: Path, variant: str) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    fields = _fields(variant, tmp_path)
    for number in range(KILLS):
        results = in_ranks(1, _killed, store.url, tmp_path / "killed", fields, number)
        assert results == [None], f"attempt {number} was not killed: {results}"
    spec = prompt_spec(*fields)
    runs = [((*FIELDS, *fields), salt, None) for salt in ("killed", "")]
    ended = in_ranks(1, train_with_code, store.url, tmp_path / "rest", runs, tmp_path / "code", seconds=3600)
    assert ended == [["", ""]]
    assert trained(store, spec, "killed") == trained(store, spec)
    whole = places(store, spec)
    assert places(store, spec, "killed") == whole
    assert [place for _, place, _ in whole] == list(range(len(whole))), "each place of the sequence once"
    print(f"{variant}: {KILLS} kills, {len(whole)} prompts, 0 lost, 0 repeated, {STEPS} steps with equal bits")
