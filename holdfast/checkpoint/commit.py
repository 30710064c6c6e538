"""Agreement over the store, in a tree: the leader of each group writes a node, writer 0 writes the root.

Writers do not send messages to each other. An index in the store means that the packs it names are durable; `.failed`
means that it will never come. Every wait is bounded. The order of the commit:

- every writer's packs, then its index
- the nodes
- the check that the sums over the whole tree equal those of the catalogue
- the fence
- the attachments (the metrics of the steps up to here)
- the fence again
- the root, by put-if-absent

What a crash leaves before the root is garbage.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.catalogue import whole_coverage
from holdfast.checkpoint.fingerprint import scalars_digest
from holdfast.checkpoint.index import MAX_INDEX_BYTES, Header
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.root import UnfitError
from holdfast.checkpoint.shard_writer import record_failure, writer_name
from holdfast.checkpoint.tree import FANOUT, Children, Node
from holdfast.spec import errors
from holdfast.spec.errors import DataError, FencedError, HoldfastError, StoreUnreachableError
from holdfast.store import ConflictError, Store, layout
from holdfast.store.json_reading import read_json_object

log = logging.getLogger("holdfast.checkpoint")

PATIENCE_SECONDS = 1800.0  # the most that the slowest writer may be behind the first
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 2.0  # seconds between two listings


class Clock(Protocol):
    """The module `time`, or a simulated clock."""

    def time(self) -> float:
        """Unix seconds; they may jump."""

    def monotonic(self) -> float:
        """Seconds that never jump."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""


def node_name(level: int, number: int) -> str:
    """The name of a node, without its extension."""
    return f"node-{level}-{number:05d}"


def levels_of(writers: int) -> int:
    """The number of levels of nodes between the writers and the root."""
    levels = 0
    while writers > FANOUT:
        writers, levels = -(-writers // FANOUT), levels + 1
    return levels


class Committer:
    """Makes one checkpoint of what `writers` writers of an attempt have saved of a step."""

    def __init__(
        self, store: Store, attempt: Attempt, writers: int, *, patience: float = PATIENCE_SECONDS, clock: Clock = time
    ) -> None:
        """`patience`: seconds after which a silent writer fails the save."""
        self._store, self._attempt, self._writers = store, attempt, writers
        self.patience, self._clock = patience, clock

    def lead(self, step: int, writer: int) -> None:
        """Write the nodes that `writer` leads, once their children exist. The leader is the first writer below a node.
        Returns immediately for a writer that leads none. Raises the failure of a child, StoreUnreachableError for one
        that does not come, DataError for one that is damaged. The failure is recorded for the writers that wait for the
        node."""
        for level in range(1, levels_of(self._writers) + 1):
            number, position = divmod(writer, FANOUT**level)
            if position:
                return
            try:
                self._write_node(step, level, number)
            except HoldfastError as error:
                record_failure(self._store, self._attempt, step, node_name(level, number), error)
                raise

    def commit(
        self,
        step: int,
        fields: Mapping[str, Any],
        scalars: Mapping[str, float | int],
        attach: Callable[[], None] = lambda: None,
        *,
        same_bits: bool = True,
    ) -> Manifest:
        """Wait for the children of the root and write it, as writer 0. `fields` are the manifest fields that only the
        run knows. `attach` writes the attachments of the steps up to here. With `same_bits`, another attempt must have
        committed the same for the step.

        Raises as `lead` does, and FencedError when the attempt has been replaced. Raises DataError when the parts of
        all writers do not make up every tensor exactly once, or when another attempt has committed other bits.
        """
        top = levels_of(self._writers)
        children = self._gathered(step, top, 0)
        catalogue, totals = children.catalogue(), children.totals
        require_whole(step, catalogue, totals, self._writers)
        self._attempt.check(self._store)
        manifest = Manifest(
            run_id=self._attempt.run_id,
            step=step,
            attempt=self._attempt.number,
            created=self._clock.time(),
            scalars=dict(scalars),
            state_digest=str(totals.digest + scalars_digest(scalars)),
            tensors=dict(catalogue),
            indexes=children.entries(catalogue),
            writers=self._writers,
            **fields,
        )
        attach()
        self._attempt.check(self._store)
        self._put_root(manifest, same_bits)
        return manifest

    def _write_node(self, step: int, level: int, number: int) -> None:
        children = self._gathered(step, level - 1, number)
        catalogue = children.catalogue()
        header = Header(step, self._attempt.number, number, level, children.totals)
        node = Node(header, catalogue, children.packs(), children.entries(catalogue))
        key = f"{self._folder(step)}{node_name(level, number)}.idx"
        if not self._store.put_if_absent(key, node.to_bytes()):
            log.debug("%s was there already: this attempt wrote it before it lost its memory", key)

    def _gathered(self, step: int, level: int, group: int) -> Children:
        """The children of group `group` on a level, once all exist."""
        count = self._writers
        for _ in range(level):
            count = -(-count // FANOUT)
        numbers = range(group * FANOUT, min(count, (group + 1) * FANOUT))
        names = [node_name(level, number) if level else writer_name(number) for number in numbers]
        self._wait(step, names)
        children = Children(f"step {step}")
        for name, number in zip(names, numbers, strict=True):
            key = f"{self._folder(step)}{name}.idx"
            data = self._store.get(key)
            header = children.add(key.removeprefix(layout.indexes(self._attempt.run_id)), data)
            header_fields = (header.step, header.attempt, header.level, header.number)
            if header_fields != (step, self._attempt.number, level, number):
                raise DataError(f"{key}: its header has (step, attempt, level, number) {header_fields}")
        return children

    def _wait(self, step: int, names: Sequence[str]) -> None:
        """Wait until these children exist, with growing pauses. Raises the failure of a child. After the timeout,
        raises FencedError if the attempt has been replaced, else StoreUnreachableError."""
        began, pause, missing = self._clock.monotonic(), FIRST_PAUSE, set(names)
        while True:
            missing -= self._there(step, missing)
            if not missing:
                return
            if self._clock.monotonic() - began >= self.patience:
                self._attempt.check(self._store)
                raise StoreUnreachableError(
                    f"step {step}: {', '.join(sorted(missing)[:8])} of {len(names)} wrote no index within "
                    f"{self.patience:g} s: not committing; see whether those ranks still run"
                )
            self._clock.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _there(self, step: int, names: set[str]) -> set[str]:
        """The children that have written an index, by one short listing per ten children. Raises the failure of a
        child."""
        existing = set()
        for prefix in sorted({name[:-1] for name in names}):
            for info in self._store.list(self._folder(step) + prefix):
                name, _, ending = info.key.rpartition("/")[2].rpartition(".")
                if name in names and ending == "failed":
                    raise _failure(self._store, info.key)
                if name in names and ending == "idx":
                    if info.size > MAX_INDEX_BYTES:
                        raise DataError(f"{info.key}: {info.size} bytes is too large for an index")
                    existing.add(name)
        return existing

    def _folder(self, step: int) -> str:
        return layout.indexes(self._attempt.run_id, self._attempt.number, step)

    def _put_root(self, manifest: Manifest, same_bits: bool) -> None:
        """Write the root. Replace one that an older attempt wrote for this step while it was being replaced. It holds
        the same bits, but its packs may have been collected before it appeared."""
        key = layout.checkpoint(manifest.run_id, manifest.step)
        if self._store.put_if_absent(key, manifest.to_bytes()):
            return
        stored, version = self._store.get_versioned(key)
        try:
            other = Manifest.from_bytes(stored, key)
        except UnfitError:
            raise
        except DataError as error:
            log.error("%s; this attempt writes it anew", error)
        else:
            if other.attempt > manifest.attempt:
                raise FencedError(f"step {manifest.step} was committed by the newer attempt {other.attempt}")
            same_plan = other.fingerprint == manifest.fingerprint
            if same_bits and same_plan and other.state_digest != manifest.state_digest:
                raise DataError(
                    f"{key}: attempt {other.attempt} committed other bits for the same step. The run is not "
                    "deterministic on this hardware; keep both logs and report it"
                )
        try:
            self._store.compare_and_swap(key, manifest.to_bytes(), version)
        except ConflictError as error:
            raise FencedError(
                f"step {manifest.step} was committed by another attempt at this moment ({error})"
            ) from None


def require_whole(step: int, catalogue: Any, totals: Any, writers: int) -> None:
    """Raises DataError unless the parts make up every tensor exactly once."""
    elements = sum(info.elements for info in catalogue.values())
    if totals.writers != writers:
        raise DataError(f"step {step}: {totals.writers} of {writers} writers are counted; please report it")
    if totals.elements != elements or totals.coverage != whole_coverage(catalogue):
        raise DataError(
            f"step {step}: the parts of all ranks hold {totals.elements} of {elements} elements, and do not make up "
            "every tensor exactly once: parts overlap or are missing. Nothing is committed; please report it"
        )


def _failure(store: Store, key: str) -> HoldfastError:
    """The failure that a child recorded."""
    try:
        record = read_json_object(store, key)
        kind, message = str(record["error"]), str(record["message"])
    except (DataError, KeyError) as error:
        return StoreUnreachableError(f"{key}: a part of the save failed, and its reason cannot be read ({error})")
    error_class = getattr(errors, kind, None) if re.fullmatch(r"[A-Z]\w*Error", kind) else None
    if isinstance(error_class, type) and issubclass(error_class, HoldfastError) and error_class is not errors.SpecError:
        return error_class(message)
    return HoldfastError(message)
