"""Lightning `Trainer`: resumed exactly, with any loader.

`fit(trainer, model, loader)` replaces `trainer.fit(model, loader)`. Holdfast saves and restores the weights, the
optimizers, the schedules, the counters of the loops and the state of callbacks. A step counts as done before the next
batch is fetched, so validation and epoch hooks that belong to it are part of it. The position in the data is a number
of batches: no loader needs a state. Lightning's own logic for restarts is not used, because it leaves out the
validation after the restored step.

Names of Lightning that are not public: the counters and `on_run_start` of its loops. They are looked up at import.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils.data import DataLoader

from holdfast.script.session import ManagedSession, session
from holdfast.script.tree import StateError

for _owner, _name in ((_FitLoop, "load_state_dict"), (_TrainingEpochLoop, "on_run_start")):
    if not hasattr(_owner, _name):
        raise StateError(f"this version of Lightning has no {_owner.__name__}.{_name}; use lightning 2.6")

log = logging.getLogger("holdfast.script")


def fit(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    *arguments: Any,
    seed: int = 0,
    state: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """Train, resume training, and export the model. `arguments` and `named` are those of `trainer.fit`.

    `seed` is the seed of each step and epoch. `state` has more objects to save by name, such as an average of the
    weights. Outside a managed launch this is `trainer.fit`. Holdfast decides when to save, so `ModelCheckpoint` has no
    effect. Raises StateError for settings that cannot be resumed exactly.
    """
    current = session(seed=seed)
    if not isinstance(current, ManagedSession):
        trainer.fit(model, *arguments, **named)
        return
    given = inspect.signature(trainer.fit).bind(model, *arguments, **named).arguments
    if given.get("ckpt_path") is not None:
        raise StateError("ckpt_path: the checkpoint is Holdfast's; leave it out")
    if trainer.reload_dataloaders_every_n_epochs:
        raise StateError("reload_dataloaders_every_n_epochs is not carried; leave it out")
    kept = [one for one in trainer.callbacks if not isinstance(one, Checkpoint)]
    if len(kept) < len(trainer.callbacks):
        log.info("checkpoint callbacks of Lightning have no effect: `checkpoint` in the spec decides when to save")
    trainer.callbacks = [ResumingCallback(trainer, current, dict(state or {})), *kept]
    trainer.fit(model, *arguments, **named)
    current.export(model)


class ResumingCallback(Callback):
    """Restores at the beginning, seeds epochs and steps, and reports each step to the session. The first callback."""

    def __init__(self, trainer: pl.Trainer, current: ManagedSession, more: dict[str, Any]) -> None:
        self._trainer, self._session, self._more = trainer, current, more
        self._position = _Position(trainer)
        self._losses: list[torch.Tensor] = []
        self._begun = False  # whether this launch iterates over the data
        self._new_step = True  # the next batch is the first of its step
        loop = trainer.fit_loop.epoch_loop
        self._on_run_start, loop.on_run_start = loop.on_run_start, self._begin_epoch
        self._before_fetch, loop._on_before_fetch = loop._on_before_fetch, self._report_and_fetch

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state into the objects that Trainer has prepared by now. Collective."""
        optimizers = {f"optimizer_{number}": one for number, one in enumerate(trainer.optimizers)}
        schedules = {f"schedule_{number}": one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
        steps = trainer.max_steps if trainer.max_steps > 0 and pl_module.automatic_optimization else None
        items = {"model": pl_module, **optimizers, **schedules, "trainer": self._position, **self._more}
        self._step = self._session.restore(**items, steps=steps)
        self._seen = trainer.global_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep Lightning from calling the hooks of the beginning of an epoch that is under way."""
        self._session.keep_listening()
        if self._position.batches:
            trainer.fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last step of an epoch, after its validation and hooks."""
        self._report()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last step."""
        self._report()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed the step again: the fetch of its batch and the hooks of its transfer may have drawn."""
        if self._new_step:
            self._session.begin_step()
        self._new_step = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss of a batch, which is its part of the loss of the step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())

    def _report(self) -> None:
        """Report a step if the optimizer made one. Raises PreemptionExit if all ranks leave."""
        if self._trainer.global_step == self._seen:
            return
        self._seen, self._step, self._new_step = self._trainer.global_step, self._step + 1, True
        metrics: dict[str, Any] = {}
        if self._trainer.optimizers:
            metrics["learning_rate"] = float(self._trainer.optimizers[0].param_groups[0]["lr"])
        if self._losses:
            metrics["loss"] = torch.stack(self._losses).sum()
            self._losses.clear()
        self._session.step(self._step, **metrics)

    def _report_and_fetch(self) -> None:
        self._report()
        self._before_fetch()

    def _begin_epoch(self, fetcher: Any) -> None:
        """Begin an epoch at its position: the first of a launch may be under way."""
        fit_loop = self._trainer.fit_loop
        if self._begun:
            self._session.begin_epoch(fit_loop.epoch_progress.current.processed)
            self._on_run_start(fetcher)
            return
        self._begun = True
        if batches := self._position.batches:
            self._position.apply()  # the loop has set its counters to 0
        self._session.begin_epoch(fit_loop.epoch_progress.current.processed)
        _iterate_from(fetcher, batches)
        fit_loop._resuming_from_checkpoint = True  # Lightning does not iterate again
        self._on_run_start(fetcher)
        fit_loop._resuming_from_checkpoint = False
        if batches:
            self._session.begin_step()


class _Position:
    """The state of a trainer apart from weights, optimizers and schedules."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._loops: dict[str, Any] | None = None  # counters to begin with
        self.batches = 0  # of the epoch that is under way at the beginning

    def state_dict(self) -> dict[str, Any]:
        """Counters, and the states of callbacks, the module, the data module and the precision, as plain values and
        tensors."""
        trainer = self._trainer
        # Without those of the validation, which is never under way here.
        loops = {name: one for name, one in trainer.fit_loop.state_dict().items() if ".val_loop." not in name}
        loops["state_dict"] = {}  # no state of a loader
        epoch = loops["epoch_progress"]
        if (
            loops["epoch_loop.batch_progress"]["is_last_batch"]
            or not loops["epoch_loop.batch_progress"]["total"]["ready"]
        ):
            for one in epoch.values():  # no epoch is under way
                one["ready"] = one["completed"]
        module: dict[str, Any] = {}
        trainer.lightning_module.on_save_checkpoint(module)
        return {
            "loops": loops,
            "should_stop": trainer.should_stop,
            "callbacks": {key: saved for key, one in self._callbacks().items() if (saved := one.state_dict())},
            "module": module,
            "precision": dict(trainer.precision_plugin.state_dict()),
            "data": {} if trainer.datamodule is None else dict(trainer.datamodule.state_dict()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""
        trainer = self._trainer
        self._loops, trainer.should_stop = saved["loops"], saved["should_stop"]
        epoch, batch = self._loops["epoch_progress"]["current"], self._loops["epoch_loop.batch_progress"]["current"]
        self.batches = batch["completed"] if epoch["ready"] > epoch["completed"] else 0
        self.apply()
        callbacks = self._callbacks()
        for key, one in saved["callbacks"].items():
            if key not in callbacks:
                raise StateError(f"the checkpoint has the state of the callback {key}, which the trainer does not have")
            callbacks[key].load_state_dict(one)
        if saved["module"]:
            trainer.lightning_module.on_load_checkpoint(saved["module"])
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        if saved["data"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(saved["data"])

    def apply(self) -> None:
        """Set the counters of the loops, without a restart as Lightning understands it."""
        if self._loops is None:
            return
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(self._loops)
        epoch_loop = fit_loop.epoch_loop
        inner = (epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
        for loop in (fit_loop, epoch_loop, *inner):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False

    def _callbacks(self) -> dict[str, Callback]:
        callbacks = self._trainer.callbacks
        return {one.state_key: one for one in callbacks if not isinstance(one, ResumingCallback)}


def _iterate_from(fetcher: Any, batches: int) -> None:
    """Begin to iterate after some batches. Those of a DataLoader with a map-style data set are not read."""
    loaders = fetcher.combined_loader.flattened
    if len(loaders) == 1 and type(loaders[0]) is DataLoader and loaders[0].batch_sampler is not None and batches:
        with _skipping(loaders[0], batches) as rest:
            iter(fetcher)
        rest.begin()
        return
    iter(fetcher)
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched -= batches


class _Rest:
    """The batches of a sampler after the first ones. The sampler draws its order with its first batch."""

    def __init__(self, sampler: Any, batches: int) -> None:
        self._sampler, self._batches = sampler, batches

    def __iter__(self) -> Iterator[Any]:
        self._left, self._rest = self._batches, iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.begin()
        return next(self._rest)

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self) -> None:
        """Leave the first batches out, if that was not done yet."""
        while self._left:
            self._left -= 1
            next(self._rest, None)


@contextmanager
def _skipping(loader: DataLoader[Any], batches: int) -> Iterator[_Rest]:
    """Let the next iterator of a loader leave out batches. A DataLoader forbids its users to set its sampler."""
    whole = loader.batch_sampler
    rest = _Rest(whole, batches)
    object.__setattr__(loader, "batch_sampler", rest)
    try:
        yield rest
    finally:
        object.__setattr__(loader, "batch_sampler", whole)
