"""Choosing which pieces of a save are compressed, and against which base: measured for each box, at every save.

Differences are taken from the bytes of an earlier save of the same writer, which stay in memory. A base is itself
stored without a base, so that two reads give any piece, and every checkpoint can be read alone. When training has moved
so far that differences save no more than MIN_GAIN, the numbers are stored again. Later saves take their differences
from these.
"""

from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.checkpoint.codec import Choice, Codec, choose, encode
from holdfast.checkpoint.index import PackName, Place

Key = tuple[str, tuple[int, ...]]  # the tensor and the offset of a box


class Part(NamedTuple):
    """The raw bytes of a piece."""

    box: Key
    start: int  # bytes into the box
    data: memoryview
    dtype: str


class Stored(NamedTuple):
    """A piece as it is written."""

    data: memoryview | bytes
    codec: Codec
    base: Place | None


@dataclass
class _Base:
    """A box as an earlier save stored it."""

    data: bytearray
    places: dict[int, Place] = field(default_factory=dict)  # by the start of a piece


class Compression:
    """The state that one writer keeps from save to save."""

    def __init__(self, threads: int = 1) -> None:
        """`threads` encode concurrently; the codec holds no interpreter lock meanwhile, and they copy nothing."""
        self._threads = threads
        self._bases: dict[Key, _Base] = {}
        self._chosen: dict[Key, Choice] = {}

    def forget(self) -> None:
        """Take no differences from anything before the next save."""
        self._bases, self._chosen = {}, {}

    def keep(self, packs: Container[PackName]) -> None:
        """Keep only bases in these packs, which the save named. Other packs may be collected."""
        self._bases = {
            box: base for box, base in self._bases.items() if all(place.pack in packs for place in base.places.values())
        }

    def begin(self) -> None:
        """Begin a save: the choices are measured anew."""
        self._chosen = {}

    def stored(self, parts: Sequence[Part]) -> list[Stored]:
        """The parts, each encoded by the choice for its box."""
        methods = [self._how(part) for part in parts]
        jobs = [
            (part, self._raw(part) if base else None, choice.scale)
            for part, (choice, base) in zip(parts, methods, strict=True)
            if choice.codec != Codec.RAW
        ]
        encoded = iter(self._encoded(jobs))
        return [
            Stored(part.data if choice.codec == Codec.RAW else next(encoded), choice.codec, base)
            for part, (choice, base) in zip(parts, methods, strict=True)
        ]

    def remember(self, part: Part, size: int, place: Place) -> None:
        """Record that a piece of a box of `size` bytes now lies at `place`. A piece without a base becomes one."""
        if place.base is not None:
            return
        if (base := self._bases.get(part.box)) is None or len(base.data) != size:
            base = self._bases[part.box] = _Base(bytearray(size))
        base.data[part.start : part.start + len(part.data)] = part.data
        base.places[part.start] = place

    def _how(self, part: Part) -> tuple[Choice, Place | None]:
        place = self._place(part)
        if part.box not in self._chosen:
            self._chosen[part.box] = choose(part.data, part.dtype, self._raw(part) if place else None)
        choice = self._chosen[part.box]
        if choice.codec == Codec.DIFFERENCES and place is None:
            choice = Choice(Codec.NUMBERS)
        return choice, place if choice.codec == Codec.DIFFERENCES else None

    def _place(self, part: Part) -> Place | None:
        base = self._bases.get(part.box)
        return None if base is None else base.places.get(part.start)

    def _raw(self, part: Part) -> memoryview:
        return memoryview(self._bases[part.box].data)[part.start : part.start + len(part.data)]

    def _encoded(self, jobs: Sequence[tuple[Part, memoryview | None, float]]) -> list[bytes]:
        def encoded(job: tuple[Part, memoryview | None, float]) -> bytes:
            part, base, scale = job
            return encode(part.data, part.dtype, base, scale)

        if self._threads <= 1:
            return [encoded(job) for job in jobs]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="encode") as pool:
            return list(pool.map(encoded, jobs))
