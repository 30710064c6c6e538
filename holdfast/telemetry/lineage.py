"""Which of a run's checkpoints is the newest one: that of the newest attempt that has committed.

The rule alone, over what its callers read of the roots: loading and collecting (`holdfast.checkpoint`, which
argues why) and the history, which must be that of the very checkpoint that a run goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def newest_of(
    steps: Sequence[int],
    writer_of: Callable[[int], int | None],
    claims: Callable[[int], Iterable[int]],
    attempt: int | None = None,
) -> int:
    """The newest of the checkpoints at `steps`, which go up. `writer_of` a step says which attempt wrote its root, None
    where that cannot be read; `claims` of a number has the numbers of all attempts above it, that of `attempt` too,
    which asks.

    Older roots are asked for only where an attempt in between could have been replaced without its knowing."""
    highest = steps[-1]
    writer = writer_of(highest)
    if writer is None or not any(writer < number and number != attempt for number in claims(writer)):
        return highest
    return max([(writer_of(step) or 0, step) for step in steps[:-1]] + [(writer, highest)])[1]
