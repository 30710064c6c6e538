"""A change of any byte of any object of a checkpoint is detected and reported, and the previous
checkpoint is loaded.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from holdfast.checkpoint import Attempt, Checkpointer, Retention, load_newest
from holdfast.collectives import Gang
from holdfast.spec.errors import BadReaderError
from holdfast.store import layout
from tests.protocol.bucket import Bucket, MemoryStore
from tests.protocol.oracle import RUN, Recording
from tests.protocol.states import blank, same, state, whole

Damage = Callable[[bytes, int], bytes]


def flipped(bit: int, data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


FLIPS: dict[str, Damage] = {f"bit {bit}": partial(flipped, bit) for bit in range(8)}
OTHERS: dict[str, Damage] = {
    "cut": lambda data, at: data[:at],
    "zeros": lambda data, at: data[:at] + bytes(len(data) - at) if any(data[at:]) else b"",
    "swapped": lambda data, at: data[at:] + data[:at] if at else data[::-1],
}


@pytest.fixture(scope="module")
def saved() -> tuple[Bucket, list[str]]:
    """A bucket with steps 1 and 2, and the keys that step 2 needs and step 1 does not."""
    bucket = Bucket()
    store, needs = MemoryStore(bucket), []
    saver = Checkpointer(store, Attempt(RUN, 1), Retention(9), describe={"dataset_id": "d", "layout": {}, "random": {}})
    for step in (1, 2):
        saver.save(step, whole(state(step)), {"step": step})
        saver.wait()
        reading = Recording(bucket)
        assert load_newest(reading, RUN, blank(whole(state(0))), Gang()) is not None
        needs.append(reading.read | {layout.checkpoint(RUN, step)})
    return bucket, sorted(needs[1] - needs[0])


def loaded(bucket: Bucket) -> tuple[int, list[object]]:
    """The step that a run of one rank resumes from, after enough attempts to be sure of damage."""
    boxes = blank(whole(state(0)))
    for attempt in count(1):
        with suppress(BadReaderError):
            manifest = load_newest(MemoryStore(bucket), RUN, boxes, Gang(), attempt)
            assert manifest is not None
            return manifest.step, boxes  # type: ignore[return-value]
    raise AssertionError


def require_noticed(
    saved: tuple[Bucket, list[str]], damage: Damage, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    sound, keys = saved
    for key in keys:
        data = sound.objects[key].data
        for at in range(0, len(data), every):
            changed = damage(data, at)
            assert changed != data
            bucket = sound.copy()
            bucket.write(key, changed)
            caplog.clear()
            step, boxes = loaded(bucket)
            assert same(boxes, whole(state(step))), f"{key} at {at}"  # type: ignore[arg-type]
            assert step == 1, f"{key} at {at}: passed unnoticed"
            assert key in caplog.text


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "holdfast.checkpoint")


@pytest.mark.parametrize("how", ["bit 0", "bit 5", *OTHERS])
def test_damage_here_and_there_in_any_object_is_noticed_named_and_survived(
    saved: tuple[Bucket, list[str]], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    require_noticed(saved, {**FLIPS, **OTHERS}[how], 29, caplog)


def flip_one(data: bytes, at: int) -> bytes:
    """Flip one bit, at a position that depends on the byte."""
    return FLIPS[f"bit {at % 8}"](data, at)


@pytest.mark.drill
@pytest.mark.parametrize("how", ["a bit", "cut"])
def test_damage_at_every_byte_of_any_object_is_noticed_named_and_survived(
    saved: tuple[Bucket, list[str]], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    require_noticed(saved, {"a bit": flip_one, **OTHERS}[how], 1, caplog)
