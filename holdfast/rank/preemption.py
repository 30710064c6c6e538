"""Preemption by SIGTERM: all ranks stop after the same step, whichever rank received the signal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.collectives import Gang, PendingFlag
from holdfast.spec.errors import TerminatedError


class PreemptionSignal:
    """Collects stop requests. The ranks agree one step later, so that no step waits for the agreement."""

    def __init__(self) -> None:
        self._wanted = False  # no Event: a second signal inside its lock would deadlock
        self._gang: Gang | None = None
        self._pending: PendingFlag | None = None

    def listen(self) -> None:
        """Treat SIGTERM and SIGINT as stop requests from now on. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._want)

    def listens(self) -> bool:
        """Whether SIGTERM still reaches this object."""
        return signal.getsignal(signal.SIGTERM) == self._want

    def _want(self, *_: object) -> None:
        self._wanted = True

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Let SIGTERM end this rank immediately while the gang forms. There is nothing to save, and a rank that
        waits for a missing peer would not see the request otherwise. Raises TerminatedError after an earlier
        request. Main thread only."""
        if self._wanted:
            raise TerminatedError("stop requested before the ranks had met")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield
        self.listen()

    def join(self) -> None:
        """Connect to the other ranks. A collective call."""
        self._gang = Gang()

    @property
    def wanted(self) -> bool:
        """Whether this rank received a stop request, or knows of one on another rank."""
        return self._wanted

    def raise_if_stopping(self, when: str) -> None:
        """Raises TerminatedError on every rank if any rank received a stop request. No step was computed, so nothing
        is lost. A collective call. `when` is part of the message."""
        assert self._gang is not None, "join() comes first"
        if self._gang.any_later(self.wanted).result():
            raise TerminatedError(f"stop requested {when}: nothing was computed yet, so there is nothing to save")

    def all_ranks_stopping(self) -> bool:
        """Whether all ranks stop now. A collective call, once per step. The result reflects the requests of one step
        before."""
        assert self._gang is not None, "join() comes first"
        answer = self._pending.result() if self._pending is not None else False
        self._pending = self._gang.any_later(self.wanted)
        self._wanted = self._wanted or answer
        return answer
