"""The base of all events: their common fields, the types of their texts, and words for people.

No text of an event holds a secret, or is too long for its line.
"""

import json
from abc import abstractmethod
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel

from holdfast.runtime.secrets import redact
from holdfast.spec.errors import ExitCode

VERSION = 1  # version of the lines; a reader skips those of a later one
MAX_TEXT = 1000  # bytes of a text as JSON
MAX_NAME = 200
MAX_WORD = 60


def _fitting(most: int) -> AfterValidator:
    def fit(text: str) -> str:
        text = redact(text).encode("utf-8", "replace").decode()
        while (excess := len(json.dumps(text, ensure_ascii=False).encode()) - 2 - most) > 0:
            text = text[: min(most, len(text) - max(2, excess // 6))].rstrip("…") + "…"
        return text

    return AfterValidator(fit)


Text = Annotated[str, _fitting(MAX_TEXT)]
Name = Annotated[str, _fitting(MAX_NAME)]
Word = Annotated[str, _fitting(MAX_WORD)]


class BaseEvent(BaseModel, frozen=True, extra="ignore"):
    """The common fields of all events. `emit` fills them in."""

    notable: ClassVar[bool] = True  # False: one of a stream, of which only the newest matters
    silent: ClassVar[bool] = False  # True: a figure, which is not shown line by line
    urgent: ClassVar[bool] = False  # True: it always interrupts a person who watches the run
    v: int = VERSION
    time: float = 0.0  # Unix seconds; later than the writer's previous event
    writer: Name = ""  # the process
    number: int = 0  # position among the writer's events, from 1; writer and number identify the event
    source: Name = ""  # the emitting part: "launcher", "rank 0", "evaluate"
    launch: int | None = None
    attempt: int | None = None

    @property
    @abstractmethod
    def text(self) -> str:
        """The event for a person, in one line."""

    @property
    def is_news(self) -> bool:
        """Whether it interrupts a person who watches the run."""
        return self.urgent


def in_words(code: int) -> str:
    """An exit code for a person."""
    try:
        return ExitCode(code).name.lower().replace("_", " ")
    except ValueError:
        return f"signal {code - 128}" if code > 128 else f"exit code {code}"


def joined(what: str, detail: str) -> str:
    return f"{what}: {' '.join(detail.split())}" if detail else what


def percent(done: int, total: int) -> int:
    return 100 * done // max(1, total)


def rounded(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
