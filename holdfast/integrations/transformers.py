"""Hugging Face `Trainer`, and trainers that inherit from it, such as TRL's: resumed exactly.

`train(trainer)` replaces `trainer.train()`. Holdfast saves and restores the weights, the optimizer, the schedule and
the position. It seeds each epoch, step and fetch, and stores no state of a generator. Three things of `Trainer` are
used: its callback events, `training_step`, and `_load_from_checkpoint`, which is private and looked up at import.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from holdfast.script.session import ManagedSession, session
from holdfast.script.tree import StateError

if not hasattr(Trainer, "_load_from_checkpoint"):
    raise StateError("this version of transformers has no Trainer._load_from_checkpoint; use transformers 5")

CARRIED = ("best_metric", "best_global_step", "num_input_tokens_seen")  # fields of TrainerState
COUNTED = ("_total_train_tokens",)  # attributes of TRL's trainers that Trainer does not save
WITH_PICKLES = ("training_args.bin",)  # files of `save_model` that are left out of an export


def train(trainer: Trainer, *, state: Mapping[str, Any] | None = None) -> Any:
    """Train, resume training, and export the model. Returns what `trainer.train()` returns.

    `state` has more objects to save by name, such as an average of the weights. Outside a managed launch this is
    `trainer.train()`. Holdfast decides when to save, so `save_strategy` has no effect. Raises StateError for settings
    that cannot be resumed exactly.
    """
    current = session(seed=trainer.args.seed)
    if not isinstance(current, ManagedSession):
        return trainer.train()
    if trainer.args.load_best_model_at_end:
        raise StateError("load_best_model_at_end needs the checkpoints of Trainer; set it to False")
    if current.exact and trainer.args.dataloader_persistent_workers:
        raise StateError("dataloader_persistent_workers keeps the seeds of the first epoch; set it to False")
    if trainer.args.auto_find_batch_size:
        raise StateError("auto_find_batch_size changes the batches of a resumed run; set per_device_train_batch_size")
    trainer.args.save_strategy = SaveStrategy.NO
    start = current.newest_step()
    callback = HoldfastCallback(trainer, current, start, dict(state or {}))
    trainer.add_callback(callback)
    with tempfile.TemporaryDirectory(prefix="holdfast-trainer-") as folder:
        if start:
            position = TrainerState(global_step=start, train_batch_size=trainer.args.train_batch_size)
            position.compute_steps(trainer.args, max(1, trainer.args.max_steps))
            position.save_to_json(str(Path(folder) / TRAINER_STATE_NAME))
            trainer._load_from_checkpoint = lambda *_, **__: None  # the callback restores the weights
        output = trainer.train(resume_from_checkpoint=folder if start else None)
    current.export(lambda target: _save(trainer, target))
    return output


class HoldfastCallback(TrainerCallback):
    """Restores at the beginning, seeds epochs and steps, and reports each step to the session."""

    def __init__(self, trainer: Trainer, current: ManagedSession, start: int, more: dict[str, Any]) -> None:
        self._trainer, self._session, self._start, self._more = trainer, current, start, more
        self._epoch: int | None = None
        self._losses: list[torch.Tensor] = []
        trainer.training_step = self._collecting(trainer.training_step)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Restore the state into the objects that Trainer has prepared by now."""
        trainer = self._trainer
        items = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "schedule": trainer.lr_scheduler,
            "trainer": _TrainerItem(trainer),
        }
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            items["scaler"] = scaler
        start = self._session.restore(**items, **self._more, steps=state.max_steps)
        if start != self._start:
            self._session.resume_again(f"the newest checkpoint was of step {self._start}, and step {start} was loaded")

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **named: Any) -> None:  # noqa: ARG002
        """Seed what the beginning of an epoch draws, such as the base seed of loader workers."""
        if self._epoch is None:
            self._epoch = state.global_step // _steps_of_epoch(named.get("train_dataloader"), args, state)
        else:
            self._epoch += 1
        self._session.begin_epoch(self._epoch)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Seed the step again: the fetch of its batches may have drawn."""
        self._session.begin_step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Report the step. Raises PreemptionExit if all ranks leave."""
        metrics: dict[str, Any] = {"learning_rate": float(self._trainer.lr_scheduler.get_last_lr()[0])}
        if self._losses:
            metrics["loss"] = torch.stack(self._losses).sum()
            self._losses.clear()
        self._session.step(state.global_step, **metrics)

    def _collecting(self, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def collecting(*arguments: Any, **named: Any) -> torch.Tensor:
            loss = training_step(*arguments, **named)
            self._losses.append(loss.detach())
            return loss

        return collecting


class _TrainerItem:
    """The state of a trainer apart from weights, optimizer and schedule: what its callbacks count."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values. Times and logs are left out: they differ from run to run."""
        state = self._trainer.state
        return {
            "fields": {name: getattr(state, name, None) for name in CARRIED},
            "counted": {name: getattr(self._trainer, name) for name in COUNTED if hasattr(self._trainer, name)},
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._callbacks().items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""
        for name, value in saved["fields"].items():
            setattr(self._trainer.state, name, value)
        for name, value in saved.get("counted", {}).items():
            setattr(self._trainer, name, value)
        for name, callback in self._callbacks().items():
            for attribute, value in saved["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> dict[str, Any]:
        """The callbacks that have a state, by class; further ones of the same class have their number, from 1."""
        named: dict[str, Any] = {}
        classes: Counter[str] = Counter()
        for one in self._trainer.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                name = type(one).__name__
                named[f"{name}-{classes[name]}" if classes[name] else name] = one
                classes[name] += 1
        return named


def _steps_of_epoch(loader: Any, args: Any, state: TrainerState) -> int:
    """Optimizer steps of an epoch, as Trainer counts them. All steps for a loader without a length."""
    try:
        batches = len(loader)
    except TypeError:
        return max(1, int(state.max_steps))
    return max(1, -(-batches // int(args.gradient_accumulation_steps)))


def _save(trainer: Trainer, folder: Path) -> None:
    """Write the model in the layout of Hugging Face. Collective: a sharded model is gathered."""
    trainer.save_model(str(folder))
    for name in WITH_PICKLES:
        (folder / name).unlink(missing_ok=True)
