"""Fetching: chooses the ranges of packs to read for the pieces that boxes need, and copies their bytes to the boxes.

No byte reaches a tensor before its checksum was compared. Neighbors are read together. Of pieces in runs, only the
needed tiles are read. Memory is bounded by `read_bytes` for each read under way. After a failed checksum the bytes are
read once more. When they fail again, DamageError names the object.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from blake3 import blake3

from holdfast.checkpoint.damage_reports import DamageError, DamageReport
from holdfast.checkpoint.index import PackName, Place, Run
from holdfast.checkpoint.pieces import Use, copy_part, decode, in_run, tile_ranges
from holdfast.checkpoint.tiles import DIGEST_BYTES, digest_of_tiles
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.interface import Read

log = logging.getLogger("holdfast.checkpoint")

WHOLE = 0.97  # share of a run from which the whole run is read


Bases = Mapping[Place, memoryview]  # the bases of pieces that are stored as differences


@dataclass(frozen=True)
class _Want:
    """A range of a pack, and the callback that takes its bytes."""

    start: int
    length: int
    use: Use
    take: Callable[[memoryview, Bases], Use | None]  # returns what fails its checksum


class Fetch:
    """Reads the packs of one run. Each read has at most `read_bytes`, unless one run or piece is larger."""

    def __init__(self, store: Store, run_id: str, read_bytes: int) -> None:
        self._store, self._run_id, self._read_bytes = store, run_id, read_bytes

    def fill(self, uses: Sequence[Use]) -> None:
        """Copy the used pieces into the boxes. Raises DamageError for data that does not verify."""
        wants: dict[PackName, list[_Want]] = defaultdict(list)
        alone: dict[Place, list[Use]] = defaultdict(list)  # the same content may be needed in several places
        of_run: dict[tuple[PackName, Run], list[Use]] = defaultdict(list)
        for use in uses:
            if use.place.run is None:
                alone[use.place].append(use)
            else:
                of_run[use.place.pack, use.place.run].append(use)
        for place, group in alone.items():
            wants[place.pack].append(_Want(place.start, place.length, group[0], partial(_take_piece, group)))
        in_parts: list[Use] = []
        for (pack, run), group in of_run.items():
            size = run.height * sum(group[0].form.widths)
            tiles = {(use.place.length, band): use for use in group for band in use.bands}
            if sum(use.form.height * use.form.widths[band] for (_, band), use in tiles.items()) < WHOLE * size:
                in_parts += group
            else:
                wants[pack].append(_Want(run.start, size, group[0], partial(_take_run, group)))
                wants[pack] += _tables(group, {})  # not needed here, but damage of them must be noticed
        tables: dict[Place, bytes] = {}
        first: dict[PackName, list[_Want]] = defaultdict(list)
        for want in _tables(in_parts, tables):
            first[want.use.place.pack].append(want)
        self._carry_out(first)
        for use in in_parts:
            wants[use.place.pack] += _tiles(use, tables[use.place])
        self._carry_out(wants)

    def _carry_out(self, wants: Mapping[PackName, Sequence[_Want]]) -> None:
        ranges = [
            (layout.pack(self._run_id, str(pack)), group)
            for pack, pack_wants in sorted(wants.items())
            for group in _neighbours(pack_wants, self._read_bytes)
        ]
        try:
            self._store.read_many(self._read(key, group) for key, group in ranges)
        except DamageError:
            raise
        except (DataError, MissingError):  # a pack is too short, or gone: which one?
            for key, group in ranges:
                self._read_alone(key, group)

    def _read(self, key: str, wants: Sequence[_Want]) -> Read:
        start = wants[0].start
        buffer = memoryview(bytearray(max(want.start + want.length for want in wants) - start))
        return Read(key, start, buffer, partial(self._take, key, start, buffer, wants))

    def _read_alone(self, key: str, wants: Sequence[_Want]) -> None:
        """Read these ranges immediately. Raises DamageError where they cannot be read."""
        read = self._read(key, wants)
        try:
            self._store.read_into(read.key, read.start, read.target)
        except (DataError, MissingError) as error:
            raise DamageError(_suspect(str(error), key, wants[-1].start, wants[-1].use)) from error
        read.use()

    def _take(self, key: str, start: int, buffer: memoryview, wants: Sequence[_Want]) -> None:
        bases = self._bases([want.use for want in wants])
        for want in wants:
            low = want.start - start
            stored = buffer[low : low + want.length]
            if (failed := want.take(stored, bases)) is None:
                continue
            self._store.read_into(key, want.start, stored)
            damage = f"{key}: the bytes at {want.start} (+{want.length}) of {failed.box.name}"
            if (failed := want.take(stored, bases)) is not None:
                raise DamageError(_suspect(f"{damage} fail their checksum", key, want.start, failed))
            log.warning("%s failed their checksum, and passed it when they were read again", damage)

    def _bases(self, uses: Sequence[Use]) -> Bases:
        """The raw bytes of the bases of pieces stored as differences, neighbors read together. Raises DamageError."""
        packs: dict[PackName, dict[Place, _Want]] = defaultdict(dict)
        bases: dict[Place, memoryview] = {}
        for use in uses:
            if (base := use.place.base) is not None:
                of_base = replace(use, place=base)
                packs[base.pack][base] = _Want(base.start, base.length, of_base, partial(_take_base, of_base, bases))
        for pack, wants in packs.items():
            for group in _neighbours(list(wants.values()), self._read_bytes):
                self._read_alone(layout.pack(self._run_id, str(pack)), group)
        return bases


def _neighbours(wants: Sequence[_Want], limit: int) -> Iterator[list[_Want]]:
    """The wanted ranges of one pack, in groups that are read together, up to `limit` bytes."""
    group: list[_Want] = []
    end = 0
    for want in sorted(wants, key=lambda want: (want.start, want.use.number)):
        if group and (want.start > end or want.start + want.length - group[0].start > limit):
            yield group
            group, end = [], 0
        group.append(want)
        end = max(end, want.start + want.length)
    if group:
        yield group


def _take_piece(uses: Sequence[Use], stored: memoryview, bases: Bases) -> Use | None:
    use = uses[0]
    base = None if use.place.base is None else bases[use.place.base]
    if (raw := decode(use.place, stored, use.box.dtype_name, use.form, base)) is None:
        return use
    for box_use in uses:
        copy_part(raw, box_use)
    return None


def _take_base(use: Use, found: dict[Place, memoryview], stored: memoryview, _: Bases) -> Use | None:
    if (raw := decode(use.place, stored, use.box.dtype_name, use.form)) is None:
        return use
    found[use.place] = raw
    return None


def _take_run(uses: Sequence[Use], stored: memoryview, _: Bases) -> Use | None:
    for use in uses:
        if (raw := in_run(use.place, stored, use.form)) is None:
            return use
        copy_part(raw, use)
    return None


def _tables(uses: Sequence[Use], found: dict[Place, bytes]) -> Iterator[_Want]:
    """The digests of all tiles of pieces, each once."""
    for use in {use.place: use for use in uses}.values():
        yield _Want(use.place.start, use.form.table, use, partial(_take_table, use, found))


def _take_table(use: Use, tables: dict[Place, bytes], stored: memoryview, _: Bases) -> Use | None:
    if digest_of_tiles(stored, use.form) != use.place.digest:
        return use
    tables[use.place] = bytes(stored)
    return None


def _tiles(use: Use, table: bytes) -> Iterator[_Want]:
    ranges = tile_ranges(use.place, use.form)
    for band in use.bands:
        tile, digest = use.tile(band), table[DIGEST_BYTES * band : DIGEST_BYTES * (band + 1)]
        yield _Want(*ranges[band], tile, partial(_take_tile, tile, digest))


def _take_tile(tile: Use, digest: bytes, stored: memoryview, _: Bases) -> Use | None:
    if blake3(stored).digest(DIGEST_BYTES) != digest:
        return tile
    copy_part(stored, tile)
    return None


def _suspect(reason: str, key: str, start: int, use: Use) -> DamageReport:
    return DamageReport(reason, key, start, index=use.index, piece=use.number)
