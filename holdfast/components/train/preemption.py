"""Preemption by SIGTERM: every rank stops after the same step, whichever of them got the signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.runtime.gang import Gang, PendingFlag
from holdfast.spec.errors import TerminatedError


class PreemptionSignal:
    """Collects the wish to leave. The ranks agree one step later, so that no step waits for the agreement."""

    def __init__(self) -> None:
        self._wanted = False  # no Event: a second signal inside its lock would be a deadlock
        self._gang: Gang | None = None
        self._pending: PendingFlag | None = None

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as the wish to leave, from now on. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._want)

    def _want(self, *_: object) -> None:
        self._wanted = True

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While the ranks meet, SIGTERM ends this one at once: there is nothing to save, and a rank that waits for one
        that will not come would not hear it otherwise. Raises TerminatedError when told before. Main thread only."""
        if self._wanted:
            raise TerminatedError("asked to leave before the ranks had met")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        self.listen()

    def join(self) -> None:
        """Connect to the other ranks. A collective call."""
        self._gang = Gang()

    @property
    def wanted(self) -> bool:
        """Whether this rank was asked to leave, or knows that it does because another one was."""
        return self._wanted

    def raise_if_stopping(self, when: str) -> None:
        """Raises TerminatedError, on every rank, if any of them was asked to leave: no step was computed, and nothing
        is lost. Collective; `when` is for the message."""
        assert self._gang is not None, "join() comes first"
        if self._gang.any_later(self.wanted).result():
            raise TerminatedError(f"asked to leave {when}: nothing was computed yet, so there is nothing to save")

    def all_ranks_stopping(self) -> bool:
        """Whether all ranks leave now. Collective, called once a step; the answer is the wish as of one step before."""
        assert self._gang is not None, "join() comes first"
        answer = self._pending.result() if self._pending is not None else False
        self._pending = self._gang.any_later(self.wanted)
        self._wanted = self._wanted or answer
        return answer
