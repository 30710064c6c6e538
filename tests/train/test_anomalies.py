"""Anomalous steps: all ranks find the same ones, and skip, rewind or stop. A restarted run repeats the decisions."""

import logging
import math
import os
import re
import signal
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from holdfast.checkpoint import open_checkpoint, read_manifest
from holdfast.checkpoint.retention import Retention, checkpoint_steps
from holdfast.collectives import noticing_lost_peers
from holdfast.engines.torch.optimizers import optimizer_of, update
from holdfast.engines.torch.scaling import LossScale
from holdfast.rank.anomalies import Anomalies
from holdfast.spec.errors import DivergedError, LostPeerError
from holdfast.spec.training import Anomalies as Settings
from holdfast.spec.training import LossScale as LossScaling
from holdfast.spec.training import Optimizer
from holdfast.store import Store
from holdfast.telemetry import read_history
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import AnomalyFound
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, _train_all, identity_of, trained
from tests.train.tiny_run import new_store, tiny_spec

INFINITE, SPIKE = 4, 7  # the batches with planted anomalies
SKIP = ("training.anomalies.action=skip", "training.anomalies.deviations=1000", "training.anomalies.window=3")
REWIND = (
    *SKIP, "training.anomalies.action=rewind", "training.anomalies.rewind_steps=3", "checkpoint.every_steps=5",
    "checkpoint.keep_last=1",
)  # fmt: skip
HALF = ("training.precision=fp16", "training.loss_scale.initial_power=24", "training.loss_scale.growth_interval=2")
ELASTIC = ("training.determinism=elastic", "parallel.strategy=fsdp")
LAMB = "training.optimizer.kind=lamb"
TWO = ("parallel.processes=2",)
EVERY = ("checkpoint.every_steps=1", "checkpoint.keep_last=20")


def plant(rank: int, size: int, url: str, folder: Path, runs: Runs, killed_after: int | None = None) -> list[str]:
    """Train with an infinite gradient in one batch, on the last rank only, and a much too high loss in another batch.
    Rank 0 dies when the progress line of step `killed_after` appears.
    """
    from holdfast.engines.torch.engine import TorchEngine
    from holdfast.rank.randomness import stream_seed

    original: Any = TorchEngine._forward_backward

    def planted(engine: Any, rows: torch.Tensor, sequences: int) -> torch.Tensor:
        loss: torch.Tensor = original(engine, rows, sequences)
        if torch.initial_seed() == stream_seed(0, "step", INFINITE) and rank == size - 1:
            gradient = next(engine._trained.named())[1].grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(math.inf)
        return loss * 100 if torch.initial_seed() == stream_seed(0, "step", SPIKE) else loss

    TorchEngine._forward_backward = planted  # type: ignore[method-assign,assignment]
    os.environ[PIPE] = str(folder) + ".events"
    if rank == 0 and killed_after is not None:
        logging.getLogger("holdfast.train").addHandler(_Killer(killed_after))
    try:
        with noticing_lost_peers():
            return _train_all(rank, size, url, folder, runs, replan=False, number=signal.SIGTERM)
    except LostPeerError:
        return ["LostPeerError"]


class _Killer(logging.Handler):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(f"step {self._step}/"):
            os.kill(os.getpid(), signal.SIGKILL)


def tensors_equal(store: Store, overrides: tuple[str, ...], one: int, other: int, salt: str = "") -> bool:
    """Whether two checkpoints of a run hold the same bits."""
    pair = [open_checkpoint(store, identity_of(tiny_spec(*overrides), salt), step) for step in (one, other)]
    return all(torch.equal(pair[0].tensor(name), pair[1].tensor(name)) for name in pair[0].tensors)


@pytest.mark.slow
def test_a_bad_step_is_skipped_rewound_or_fatal_on_all_ranks(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    skip, rewind = (*SKIP, *TWO, *EVERY), (*REWIND, *TWO, "checkpoint.keep_last=20")
    stop = (*SKIP, *TWO, "training.anomalies.action=stop")
    runs: Runs = [(skip, "", None), (skip, "left", 5), (skip, "left", None), (rewind, "", None)]
    runs += [((*skip, LAMB), "", None), (stop, "", None)]
    endings = in_ranks(2, plant, store.url, tmp_path / "ranks", runs, seconds=400)[0]
    assert endings == ["", "PreemptedError", "", "", "", "DivergedError"]
    whole = trained(store, tiny_spec(*skip))
    assert trained(store, tiny_spec(*skip), "left") == whole
    assert trained(store, tiny_spec(*rewind))["digest"] != whole["digest"]
    for step in (INFINITE, SPIKE):
        for layout in (skip, (*skip, LAMB)):
            assert tensors_equal(store, layout, step, step + 1)
    assert checkpoint_steps(store, identity_of(tiny_spec(*rewind))) == [3, 5, 6, 9, 10, 12]
    assert tensors_equal(store, rewind, INFINITE // 3 * 3, INFINITE + 1)
    held_steps = [row["step"] for row in read_history(store, identity_of(tiny_spec(*skip))) if row["held"]]
    assert held_steps == [INFINITE + 1, SPIKE + 1]
    assert checkpoint_steps(store, identity_of(tiny_spec(*stop))) == [3]
    anomalies = [
        event for event in PipeEvents(Path(f"{tmp_path / 'ranks'}.events")).new() if isinstance(event, AnomalyFound)
    ]
    assert [(event.step, event.action) for event in anomalies[:2]] == [(step, "skip") for step in held_steps]
    assert anomalies[0].grad_norm == "inf"
    assert anomalies[-1].action == "stop"
    assert re.search(r"synthetic at tokens (\d+-\d+(, )?){8}$", anomalies[0].text)


@pytest.mark.drill
def test_a_run_killed_around_a_rewind_repeats_the_same_decision(tmp_path: Path) -> None:
    store, rewind = new_store(tmp_path / "store"), (*REWIND, *TWO)
    runs: Runs = [((*rewind, *EVERY), "all", None), (rewind, "few", None)]
    assert in_ranks(2, plant, store.url, tmp_path / "whole", runs, seconds=400)[0] == ["", ""]
    killed: Runs = [(rewind, "killed", None)]
    for step in (8, 9):
        assert in_ranks(2, plant, store.url, tmp_path / f"killed-{step}", killed, step)[0] is None
    assert in_ranks(2, plant, store.url, tmp_path / "last", killed)[0] == [""]
    for step in (INFINITE, SPIKE):
        assert tensors_equal(store, (*rewind, *EVERY), step // 3 * 3, step + 1, "all")
        assert not tensors_equal(store, (*rewind, *EVERY), step, step + 1, "all")
    whole = trained(store, tiny_spec(*rewind), "few")
    assert trained(store, tiny_spec(*rewind), "all") == whole == trained(store, tiny_spec(*rewind), "killed")


@pytest.mark.drill
def test_elastic_and_half_precision_runs_skip_steps_reproducibly(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    elastic, half = (*SKIP, *ELASTIC), (*HALF, "parallel.strategy=fsdp", *TWO)
    runs: Runs = [(elastic, "two", None), (half, "whole", None), (half, "left", 5), (half, "left", None)]
    endings = in_ranks(2, plant, store.url, tmp_path / "2", runs, seconds=400)[0]
    assert endings == ["", "", "PreemptedError", ""]
    assert in_ranks(1, plant, store.url, tmp_path / "1", [(elastic, "one", None)])[0] == [""]
    first, second = (trained(store, tiny_spec(*elastic), salt)["digest"] for salt in ("one", "two"))
    assert first == second

    assert trained(store, tiny_spec(*half), "left") == trained(store, tiny_spec(*half), "whole")
    identity = identity_of(tiny_spec(*half), "whole")
    scalars = read_manifest(store, identity, 12).scalars
    held_steps = [row["step"] for row in read_history(store, identity) if row["held"]]
    assert held_steps[0] == 1
    assert INFINITE + 1 in held_steps
    assert scalars["optimizer.step"] == 12 - len(held_steps)
    assert scalars["loss_scale.scale"] in [2.0**power for power in range(18, 25)]


def judged(settings: Settings, losses: list[float], norms: list[float] | None = None) -> list[int]:
    """The steps whose updates are held back, for given losses and norms."""
    anomalies, held_steps = Anomalies(settings, torch.device("cpu")), []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True)):
        anomalies.begin_step(step)
        answer = anomalies.judge(torch.tensor(loss), torch.tensor(norm))
        held_steps += [step] if answer is not None and answer.item() else []
    return held_steps


def test_a_spike_is_above_the_running_mean_after_the_window_is_full() -> None:
    settings = Settings(action="skip", deviations=3, window=4)
    usual = [2.0, 2.1, 1.9, 2.05]
    assert judged(settings, [2.0, 9.0, 2.1, 1.9, 2.0, 2.05]) == []  # the window is not full
    assert judged(settings, [*usual, 2.15, 9.0, 2.0, 9.0]) == [5, 7]  # the first spike does not change what is usual
    assert judged(settings, [*usual, 0.1]) == []  # a low value is no spike
    assert judged(settings, [2.0] * 5, [*usual, 9.0]) == [4]
    assert judged(settings, [*usual, math.nan, 2.0], [1.0] * 6) == [4]
    assert judged(Settings(action="skip"), [*usual, 9e9, -math.inf]) == [5]
    assert judged(Settings(), [math.nan]) == []  # the anomaly ends the run when its history is written


@pytest.mark.parametrize(("kind", "anywhere"), [("adamw", True), ("adamw", False), ("lamb", False)])
def test_an_update_that_is_held_back_changes_no_bit_of_weights_moments_and_count(
    kind: Literal["adamw", "lamb"], anywhere: bool
) -> None:
    layer = torch.nn.Linear(5, 3)
    optimizer = optimizer_of(layer.named_parameters(), Optimizer(kind=kind), anywhere=anywhere, rows=None)

    def step(held: float) -> list[torch.Tensor]:
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        update(optimizer, torch.tensor(held))
        return [tensor.detach().clone() for tensor in (*layer.parameters(), *chain(*map(dict.values, states())))]

    def states() -> list[dict[str, torch.Tensor]]:
        return [optimizer.state[parameter] for parameter in layer.parameters()]

    updated = step(0.0)
    assert [state["step"].item() for state in states()] == [1, 1]
    assert all(map(torch.equal, step(1.0), updated))
    assert not any(map(torch.equal, step(0.0), updated))


def test_the_loss_scale_resumes_from_its_saved_state() -> None:
    settings, cpu = LossScaling(initial_power=4, growth_interval=2), torch.device("cpu")
    original, other, scales = LossScale(settings, cpu), LossScale(settings, cpu), []
    for step, norm in enumerate([1.0, 1.0, 1.0, 1.0, math.inf]):
        if step == 3:
            other.restored(original.scalars())
        for scale in (original, other)[: 1 + (step >= 3)]:
            scale.overflowed(torch.tensor(norm))
        scales.append(original.scale.item())
    assert scales == [16, 32, 32, 64, 32]
    assert original.scalars() == other.scalars()


def test_max_consecutive_anomalies_end_the_run_and_a_good_step_resets_the_count() -> None:
    anomalies = Anomalies(Settings(action="skip", max_consecutive=2), torch.device("cpu"))
    for step, loss in enumerate([math.nan, 1.0, math.nan, 1.0, math.inf]):
        anomalies.begin_step(step)
        anomalies.judge(torch.tensor(loss), torch.tensor(1.0))
        assert not anomalies.resolve(before=step + 1)
    anomalies.begin_step(5)
    anomalies.judge(torch.tensor(1.0), torch.tensor(math.nan))
    with pytest.raises(DivergedError, match="step 6: loss 1, gradient norm inf: the 2th anomaly in a row"):
        anomalies.resolve(before=6)


def test_anomaly_state_is_restored_from_its_scalars() -> None:
    settings, cpu = Settings(action="skip", deviations=3, window=3), torch.device("cpu")
    original, other = Anomalies(settings, cpu), Anomalies(settings, cpu)
    for step, loss in enumerate([2.0, 2.1, math.nan, 1.95, 2.2, 7.0, 2.0]):
        if step == 4:
            other.restored(original.scalars())
        for monitor in (original, other)[: 1 + (step >= 4)]:
            monitor.begin_step(step)
            monitor.judge(torch.tensor(loss), torch.tensor(loss / 3))
    assert original.scalars() == other.scalars()
    assert original.scalars()["anomalies.found"] == 2


def test_a_rewind_restores_the_newest_multiple_and_discards_later_steps() -> None:
    rewinds: list[int] = []

    def go_back(step: int) -> dict[str, float]:
        rewinds.append(step)
        return {}

    anomalies = Anomalies(Settings(action="rewind", rewind_steps=4), torch.device("cpu"), go_back=go_back)
    for step in range(8):
        anomalies.begin_step(step)
        is_held = anomalies.judge(torch.tensor(math.nan if step == 6 else 1.0), torch.tensor(1.0))
        assert is_held is not None
        assert bool(is_held) == (step >= 6)  # the next step starts from a state that the rewind discards
        assert anomalies.resolve(before=step) == (step == 7)
    assert rewinds == [4]
    assert [anomalies.saves(saved_step) for saved_step in (3, 4, 5)] == [False, True, False]


@pytest.mark.parametrize("overflows", [False, True])
def test_rewinds_are_no_longer_in_a_row_once_a_multiple_is_behind_also_where_fp16_overflowed_there(
    overflows: bool,
) -> None:
    settings = Settings(action="rewind", rewind_steps=4, max_consecutive=2)
    anomalies = Anomalies(settings, torch.device("cpu"), go_back=lambda _: anomalies.scalars())
    for step in (0, 1, 2, 3, 4, 5):
        anomalies.begin_step(step)
        loss = torch.tensor(math.nan if step in (2, 5) else 1.0)
        anomalies.judge(loss, torch.tensor(1.0), torch.tensor(float(overflows and step == 3)))
        assert anomalies.resolve(before=step + 1) == (step in (2, 5))  # and no error, because they are not consecutive


def test_retention_keeps_the_rewind_target_of_every_checkpoint() -> None:
    committed = dict.fromkeys([3, 6, 8, 9, 11], 0.0)
    assert Retention(1).kept(committed) == [11]
    assert Retention(1, rewind_steps=3).kept(committed) == [9, 11]
    assert Retention(3, rewind_steps=3).kept(committed) == [6, 8, 9, 11]
    assert Retention(1, rewind_steps=20).kept(committed) == [11]  # a rewind would restore the initial state
