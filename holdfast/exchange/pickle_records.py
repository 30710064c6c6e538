"""Parser of pickles from other systems into plain records.

Nothing is imported, called or looked up. A name in a pickle stays text. An object becomes a `Record` of that text, its
arguments and its state. A dictionary becomes a `Table` of pairs, so no key is hashed. Time and memory are linear in the
bytes, and bounded. A pickle is refused if it nests without end, repeats itself, or declares a large size. Nothing here
recurses. Callers read only the expected parts.
"""

import gc
import struct
from collections.abc import Callable, Collection
from typing import Any

from holdfast.spec.errors import DataError

MOST_BYTES = 256 * 2**20
MOST_OPCODES = 64_000_000
MOST_OBJECTS = 16_000_000  # containers; about 100 bytes each
MOST_STACK = 1_000_000
MOST_MARKS = 1_000  # open at the same time: the nesting depth of lists, dictionaries and tuples
MOST_MEMO = 16_000_000
_DICTIONARIES = ("collections.OrderedDict", "builtins.dict", "__builtin__.dict")


class Name:
    """A class or function that a pickle names: "module.name". It is text and is not looked up."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Record:
    """An object: its class or function, the arguments, and the state that was set."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None


class Table:
    """A dictionary, as its pairs in order."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def by_text(self) -> dict[str, Any]:
        """The pairs with a text key. The last of equal keys counts, as in a dictionary."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


class _RefusedError(Exception):
    pass


def read_pickle(data: bytes, source: str, names: Collection[str]) -> Any:
    """The content of a pickle of protocol 2 to 5: numbers, text, bytes, tuples, lists, `Table`s and `Record`s.
    Raises DataError, with `source` in the message, for a name not in `names` and for broken or unbounded data."""
    if len(data) > MOST_BYTES:
        raise DataError(f"{source}: is a pickle of {len(data)} bytes, and at most {MOST_BYTES} are read")
    collects = gc.isenabled()
    gc.disable()  # it would scan millions of new values repeatedly and find nothing
    try:
        return _Machine(data, names).run()
    except _RefusedError as refused:
        raise DataError(f"{source}: cannot be read safely: {refused}") from None
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        raise DataError(f"{source}: cannot be read safely: it is no whole pickle") from None
    finally:
        if collects:
            gc.enable()


def record_of(value: Any, kind: str) -> dict[str, Any] | None:
    """The fields of an object of `kind` whose state is a dictionary, or None for anything else."""
    if isinstance(value, Record) and value.kind == kind and isinstance(value.state, Table):
        return value.state.by_text()
    return None


class _Machine:
    def __init__(self, data: bytes, names: Collection[str]) -> None:
        self._data, self._names = data, names
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._objects = 0

    def run(self) -> Any:
        data, stack = self._data, self._stack
        for _ in range(min(len(data), MOST_OPCODES)):
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return stack.pop()
            action = _ACTIONS[opcode]
            if action is None:
                raise _RefusedError(f"opcode {opcode:#04x} at byte {self._at - 1} is none that a checkpoint needs")
            action(self)
            if len(stack) > MOST_STACK:
                raise _RefusedError(f"more than {MOST_STACK} values wait on its stack")
        if len(data) > MOST_OPCODES:
            raise _RefusedError(f"it has more than {MOST_OPCODES} opcodes")
        raise IndexError

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self._at + size
        if end > len(self._data):
            raise IndexError
        data = self._data[self._at : end]
        self._at = end
        return data

    def number(self, size: int) -> int:
        """The next unsigned integer."""
        return int.from_bytes(self.take(size), "little")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def made(self, value: Any) -> None:
        """Push a container that takes additional memory."""
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise _RefusedError(f"it makes more than {MOST_OBJECTS} objects")
        self._stack.append(value)

    def mark(self) -> None:
        if len(self._marks) >= MOST_MARKS:
            raise _RefusedError(f"its values lie more than {MOST_MARKS} deep in each other")
        self._marks.append(len(self._stack))

    def marked(self) -> list[Any]:
        """Pop all values above the newest mark."""
        begin = self._marks.pop()
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def remember(self, index: int) -> None:
        if len(self._memo) >= MOST_MEMO:
            raise _RefusedError(f"it remembers more than {MOST_MEMO} values")
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, size: int) -> None:
        self._stack.append(self._memo[self.number(size)])

    def pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def text(self, size: int) -> None:
        self._stack.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def octets(self, size: int) -> None:
        self._stack.append(self.take(self.number(size)))

    def long(self) -> None:
        self._stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def signed(self) -> None:
        self._stack.append(struct.unpack("<i", self.take(4))[0])

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self.take(8))[0])

    def pack(self, size: int) -> None:
        """Push a tuple of the newest values."""
        if size > len(self._stack):
            raise IndexError
        items = tuple(self._stack[len(self._stack) - size :])
        del self._stack[len(self._stack) - size :]
        self.made(items)

    def line(self) -> str:
        """The text up to the next line break."""
        end = self._data.find(b"\n", self._at, self._at + 300)
        if end < 0:
            raise IndexError
        text = self.take(end - self._at).decode("utf-8")
        self._at += 1
        return text

    def global_name(self) -> None:
        module = self.line()
        self._named(module, self.line())

    def stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise _RefusedError("it names something by what is no text")
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        if (text := f"{module}.{name}") not in self._names:
            raise _RefusedError(f"it names {text[:100]!r}, which no checkpoint of this kind holds")
        self.made(Name(text))

    def make(self) -> None:
        """REDUCE and NEWOBJ: push a record, or a table."""
        arguments, kind = self._stack.pop(), self._stack.pop()
        if not (isinstance(kind, Name) and isinstance(arguments, tuple)):
            raise _RefusedError("it makes an object of what is no name")
        if kind.text in _DICTIONARIES and not arguments:
            self.made(Table())
        else:
            self.made(Record(kind.text, arguments))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Table):
            return  # attributes of a dictionary, in which torch keeps versions
        if not isinstance(target, Record) or target.state is not None:
            raise _RefusedError("it sets the state of what is no object, or has one")
        target.state = state

    def append(self, values: list[Any]) -> None:
        if not isinstance(target := self._stack[-1], list):
            raise _RefusedError("it appends to what is no list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not isinstance(target := self._stack[-1], Table) or len(values) % 2:
            raise _RefusedError("it sets items of what is no dictionary")
        self._objects += len(values) // 2
        target.pairs.extend(zip(values[::2], values[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set_items([key, value])

    def persistent(self) -> None:
        self.made(Record(PERSISTENT, (self._stack.pop(),)))

    def refer(self) -> None:
        self._stack.append(self._stack[-1])

    def skip(self, size: int) -> None:
        self.take(size)


PERSISTENT = "persistent id"  # kind of a record for data outside the pickle
_STOP = ord(".")
_NAMED: dict[str, Callable[[_Machine], None]] = {
    "\x80": lambda m: m.skip(1),  # PROTO
    "\x95": lambda m: m.skip(8),  # FRAME
    "(": _Machine.mark,
    "0": _Machine.pop,
    "1": lambda m: m.marked().clear(),  # POP_MARK
    "2": _Machine.refer,  # DUP
    "N": lambda m: m.push(None),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "J": _Machine.signed,  # BININT
    "K": lambda m: m.push(m.number(1)),  # BININT1
    "M": lambda m: m.push(m.number(2)),  # BININT2
    "\x8a": _Machine.long,  # LONG1
    "G": _Machine.real,  # BINFLOAT
    "\x8c": lambda m: m.text(1),  # SHORT_BINUNICODE
    "X": lambda m: m.text(4),  # BINUNICODE
    "\x8d": lambda m: m.text(8),  # BINUNICODE8
    "C": lambda m: m.octets(1),  # SHORT_BINBYTES
    "B": lambda m: m.octets(4),  # BINBYTES
    "\x8e": lambda m: m.octets(8),  # BINBYTES8
    ")": lambda m: m.push(()),
    "\x85": lambda m: m.pack(1),
    "\x86": lambda m: m.pack(2),
    "\x87": lambda m: m.pack(3),
    "t": lambda m: m.made(tuple(m.marked())),
    "]": lambda m: m.made([]),
    "a": lambda m: m.append([m._stack.pop()]),
    "e": lambda m: m.append(m.marked()),
    "\x8f": lambda m: m.made([]),  # EMPTY_SET
    "\x90": lambda m: m.append(m.marked()),  # ADDITEMS
    "\x91": lambda m: m.made(m.marked()),  # FROZENSET
    "}": lambda m: m.made(Table()),
    "s": _Machine.set_item,
    "u": lambda m: m.set_items(m.marked()),
    "c": _Machine.global_name,
    "\x93": _Machine.stack_name,
    "R": _Machine.make,
    "\x81": _Machine.make,  # NEWOBJ
    "b": _Machine.build,
    "Q": _Machine.persistent,  # BINPERSID
    "q": lambda m: m.remember(m.number(1)),
    "r": lambda m: m.remember(m.number(4)),
    "\x94": _Machine.memoize,
    "h": lambda m: m.recall(1),
    "j": lambda m: m.recall(4),
}
_ACTIONS: list[Callable[[_Machine], None] | None] = [_NAMED.get(chr(code)) for code in range(256)]
