"""What a training script calls: restore, step, log, save, export.

The class here is the session of a script outside a managed launch. `session` has that of a managed one.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.script.data import DatasetRows
from holdfast.script.seeding import generator, seed_all
from holdfast.script.tree import StateError
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.script")


class PreemptionExit(SystemExit):
    """All ranks saved a checkpoint and exit, because one got a stop request. `except Exception` does not catch it."""

    def __init__(self, step: int) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.step = step


class StopExit(SystemExit):
    """A verification has reached its last step."""


class Session:
    """The session of this process. This class is that of a script outside a managed launch: it saves nothing."""

    managed = False
    run_id = ""
    attempt = 0

    def __init__(self, seed: int | None = None, seed_rank: int | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.epoch = 0  # the script sets it: part of the key of what a fetch draws
        self._has_epochs = False  # whether the loop calls `begin_epoch`
        self.seed = seed or 0
        self._seeds = seed is not None
        self._seed_rank = self.rank if seed_rank is None else seed_rank
        self._step: int | None = None  # steps done; None before `restore`
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def steps_done(self) -> int:
        """The steps done so far; 0 before `restore`."""
        return self._step or 0

    @property
    def folder(self) -> Path:
        """A scratch folder of this rank, which is gone at the end."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="holdfast-script-")
        return Path(self._folder.name)

    def restore(
        self,
        *,
        per_rank: Mapping[str, Any] = {},  # noqa: ARG002
        steps: int | None = None,  # noqa: ARG002
        **state: Any,  # noqa: ARG002
    ) -> int:
        """Fill the state in place and return the steps done: 0 for a first state, which stays as it is.

        Give modules, optimizers, schedules and other objects by name. `per_rank` has objects whose state belongs to one
        rank, such as a loader. `steps` is the number of steps of the whole run, if it is known. Collective. Call it
        once, after `init_process_group`, and before the first step. Raises StateError for an object that a checkpoint
        cannot hold, and for one that does not fit the checkpoint.
        """
        self._step = 0
        return 0

    def step(self, step: int, /, **metrics: float | Tensor) -> None:
        """Report that `step` optimizer steps are done, with metrics of the last one.

        Saves when it is due, and seeds the next step. Collective: every rank calls it after every step. Raises
        StateError for a step that is skipped or repeated, DivergedError for a `loss` that is not finite, and
        PreemptionExit after a save if a rank got a stop request.
        """
        self._count(step)
        if step % 10 == 0 and self.rank == 0:
            numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
            log.info("step %d  %s", step, "  ".join(f"{name} {float(value):.4g}" for name, value in numbers.items()))

    def begin_epoch(self, epoch: int) -> None:
        """Seed the beginning of an epoch, such as the base seed of loader workers. What a fetch draws depends on the
        epoch from here on."""
        self.epoch, self._has_epochs = epoch, True
        if self._seeds:
            seed_all(self.seed, "epoch", epoch, self._seed_rank)

    def begin_step(self) -> None:
        """Seed the current step again, after code that may have drawn. `step` seeds the next step by itself."""
        if self._seeds and self._step is not None:
            seed_all(self.seed, "step", self._step, self._seed_rank)

    def log(self, step: int, /, **metrics: float | Tensor) -> None:
        """Add metrics to the row of a step of the history. Rank 0's are kept."""

    def save(self, step: int) -> None:
        """Save the state after `step` steps, which must be the current one, although it is not due. Collective."""

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Whether `session.step(step)` will save. Collective if `checkpoint` counts minutes."""
        return False

    def should_stop(self) -> bool:
        """Whether the loop ends now, after a save: the answer is the same on every rank. For loops that stop by a flag.
        Collective."""
        return False

    def export(self, what: nn.Module | str | Path | Callable[[Path], object], *, step: int | None = None) -> None:  # noqa: ARG002
        """Export the result of the run after the last step: a module as safetensors by name, a folder, or what a
        function writes into a folder. Collective. Raises StateError for an empty folder and for pickled files."""
        log.info("this is no managed run: nothing is exported")

    def generator(self, stream: str, step: int, device: str | torch.device = "cpu") -> torch.Generator:
        """A generator for one named stream of random numbers at one step."""
        return generator(self.seed, stream, step, self._seed_rank, device)

    def input(self, name: str, default: str | Path | None = None) -> Path:
        """The path of an input of `train.inputs`: a file or a folder, which is only read. Outside a managed run it is
        `default`. Raises StateError for an input that the spec does not have, and outside a managed run without a
        default."""
        if default is None:
            raise StateError(
                f"session.input({name!r}): this is no managed run; use `holdfast run`, or give a default path"
            )
        return Path(default)

    def dataset(
        self,
        global_batch: int,  # noqa: ARG002
        context: int,  # noqa: ARG002
        *,
        rank: int | None = None,  # noqa: ARG002
        ranks: int | None = None,  # noqa: ARG002
    ) -> DatasetRows:
        """The rows of the dataset of the spec's `data`, for this rank. The batch of a step depends only on the dataset,
        the session's seed and the step, so no position is saved.

        `global_batch` rows of `context` + 1 tokens are one step of all ranks. `rank` of `ranks` gets an equal share;
        default: those of the process. Ranks that compute the same rows, as with tensor parallelism, give the same
        `rank`. Raises StateError without a dataset or for a batch that `ranks` does not divide, and DataError for a
        source that is shorter than a row.
        """
        raise StateError("session.dataset: this is no managed run; use `holdfast run` with a spec that has data")

    def _share(self, rank: int | None, ranks: int | None, global_batch: int) -> tuple[int, int]:
        """The share of a batch that this process gets."""
        rank, ranks = self.rank if rank is None else rank, self.world_size if ranks is None else ranks
        if not 0 <= rank < ranks:
            raise StateError(f"session.dataset: rank {rank} is not one of {ranks}; give rank and ranks together")
        if global_batch < 1 or global_batch % ranks:
            raise StateError(
                f"session.dataset: {ranks} ranks do not divide global_batch {global_batch}; use a multiple of {ranks}"
            )
        return rank, ranks

    def _count(self, step: int) -> None:
        """Count one step. Raises StateError for any number but the next one."""
        if self._step is None:
            raise StateError("session.step was called before session.restore: write start = session.restore(model=...)")
        if step != self._step + 1:
            raise StateError(
                f"session.step({step}) follows step {self._step}; the next one is {self._step + 1}. Begin the loop at "
                "the step that restore returns: start = session.restore(...); for step in range(start, steps): ...; "
                "session.step(step + 1)"
            )
        self._step = step
