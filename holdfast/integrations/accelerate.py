"""Hugging Face accelerate: a loop over prepared loaders that resumes at its position.

`ResumableBatches(session, loader)` iterates over a loader, epoch after epoch. Given to `session.restore`, it begins
after the batches of the restored step, which are not read again. The order of an epoch depends only on the seed and the
epoch.
"""

from collections.abc import Iterator
from typing import Any

from accelerate import skip_first_batches

from holdfast.script.interface import Session
from holdfast.script.seeding import generator as stream_generator
from holdfast.script.tree import StateError


class ResumableBatches:
    """The batches of a loader from `accelerator.prepare`, epoch after epoch and without an end."""

    def __init__(self, session: Session, loader: Any) -> None:
        """Raises StateError for workers that outlive an epoch: they keep the seeds of the first one."""
        if getattr(loader, "persistent_workers", False):
            raise StateError("persistent_workers keeps the seeds of the first epoch; leave it out")
        self._session, self._loader = session, loader
        self.epoch = 0
        self.batch = 0  # batches of the epoch that the loop got
        self._seeded = -1  # steps done when a step was seeded

    def __iter__(self) -> Iterator[Any]:
        while True:
            batches = 0
            for batch in self._epoch():
                batches += 1
                self.batch += 1
                if self._session.steps_done != self._seeded:  # the fetch may have drawn
                    self._seeded = self._session.steps_done
                    self._session.begin_step()
                yield batch
            if not batches and not self.batch:
                raise StateError("the loader has no batch")
            self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position after the batch that the loop got last."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Take the position of a checkpoint."""
        self.epoch, self.batch = saved["epoch"], saved["batch"]

    def _epoch(self) -> Any:
        """The loader of this epoch, from its position."""
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self.epoch)
            self._loader.iteration = self.epoch  # what it sets when it begins
        generator = getattr(self._loader, "synchronized_generator", None)
        if generator is not None:
            # Of no rank: all ranks share the order, and each has a part of it.
            generator.manual_seed(stream_generator(self._session.seed, "order", self.epoch).initial_seed())
        self._session.begin_epoch(self.epoch)
        return skip_first_batches(self._loader, self.batch) if self.batch else self._loader
