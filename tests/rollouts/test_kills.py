"""A hundred kills of a run that learns from its own answers: no prompt is lost or repeated, and no bit changes."""

from __future__ import annotations

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
from tests.rollouts.prompt_run import FIELDS, prompt_spec, write_prompts
from tests.train.ranks import identity_of, train_in_ranks, trained

KILLS = int(os.environ.get("HOLDFAST_KILLS", "100"))
MOST_CALLS = 12  # before a kill; a step has about four
RUN = ("training.steps=120", "checkpoint.every_steps=1", "training.grpo.updates=2", "training.log_every=1000")


def _killed(rank: int, size: int, url: str, folder: Path, seed: int) -> Any:
    """Train as a rank that is killed before or after a random call of a step: a lot, all lots, a record, the update."""
    import holdfast.engines.torch.engine as engine
    from holdfast.rank.answer_batches import AnswerBatches
    from holdfast.rollouts.records import LotRecord
    from tests.train import ranks

    draw = random.Random(seed)
    left, after = draw.randint(1, MOST_CALLS), draw.random() < 0.5

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*given, **named)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in ("_lot", "_load", "_logprobs"):
        setattr(AnswerBatches, name, counted(getattr(AnswerBatches, name)))
    LotRecord.dump = counted(LotRecord.dump)  # type: ignore[method-assign]
    engine.update = counted(engine.update)
    return ranks._train_all(rank, size, url, folder, [((*FIELDS, *RUN), "killed", None)], False, signal.SIGTERM)


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
def test_kills_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    for number in range(KILLS):
        results = in_ranks(1, _killed, store.url, tmp_path / "killed", number)
        assert results == [None], f"attempt {number} was not killed: {results}"
    spec = prompt_spec(*RUN)
    runs = [((*FIELDS, *RUN), salt, None) for salt in ("killed", "")]
    assert train_in_ranks(1, store.url, tmp_path / "rest", runs) == ["", ""]
    assert trained(store, spec, "killed") == trained(store, spec)
    whole = places(store, spec)
    assert places(store, spec, "killed") == whole
    assert [place for _, place, _ in whole] == list(range(len(whole))), "each place of the sequence once"
