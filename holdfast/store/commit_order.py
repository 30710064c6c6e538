"""The newest checkpoint of a run: that of the newest attempt that has committed.

This is the rule alone, over the parts of the roots that its callers read. Loading and collecting follow it
(`holdfast.checkpoint.lineage`, which explains why). The history follows it too, because it must be that of the
checkpoint that a run continues from. The history is below the checkpoints in the layers, so the rule is in the store.
"""

from collections.abc import Callable, Iterable, Sequence


def newest_of(
    steps: Sequence[int],
    writer_of: Callable[[int], int | None],
    claims: Callable[[int], Iterable[int]],
    attempt: int | None = None,
) -> int:
    """The newest of the checkpoints at `steps`, in ascending order. `writer_of` maps a step to the attempt that wrote
    its root, None if unreadable. `claims` maps a number to all attempts above it, including the caller's `attempt`.

    Older roots are read only where an attempt in between could have been replaced without noticing.
    """
    highest = steps[-1]
    writer = writer_of(highest)
    if writer is None or not any(writer < number and number != attempt for number in claims(writer)):
        return highest
    return max([(writer_of(step) or 0, step) for step in steps[:-1]] + [(writer, highest)])[1]
