"""Conditions on runs for `holdfast runs --where`: comparisons of fields, joined by and, or, not.

Python's parser reads the text, and only the few nodes below are evaluated. So nothing is called and nothing is
imported. A text has at most LONGEST characters.
"""

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.pipelines.view.audit import flatten
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.spec.errors import UsageError

LONGEST = 1000  # characters
FIELDS: dict[str, Callable[[RunRecord], Any]] = {
    "run": lambda record: record.run_id,
    "name": lambda record: record.name,
    "state": lambda record: record.state,
    "step": lambda record: record.step,
    "steps": lambda record: record.steps,
    "loss": lambda record: record.loss,
    "verdict": lambda record: record.word,
    "version": lambda record: record.model_version,
    "attempts": lambda record: record.attempts,
    "backend": lambda record: record.submission.get("backend", ""),
    "dataset": lambda record: record.dataset_id,
    "tag": lambda record: record.tags,
    "note": lambda record: record.note,
    "changed": lambda record: record.changed,
    "started": lambda record: record.started,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_QUOTED_OR_HYPHENATED = re.compile(r"""('[^']*'|"[^"]*")|\b[A-Za-z_]\w*(?:-\w+)+""")
_HYPHEN = "\u01c3"  # a letter in place of the hyphens of a word, which Python would read as a difference
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def values_of(record: RunRecord) -> dict[str, Any]:
    """The values of a run that conditions can name: FIELDS, the spec's fields by dotted name, and the verdict's metrics
    as `evaluation.NAME`."""
    metrics = (record.verdict or {}).get("metrics") or {}
    return {
        **dict(flatten(record.spec)),
        **{f"evaluation.{name}": value for name, value in metrics.items()},
        **{name: value(record) for name, value in FIELDS.items()},
    }


def select_runs(records: Sequence[RunRecord], where: str = "", sort: str = "") -> list[RunRecord]:
    """The runs that meet `where`, in the order of the field `sort` (`-NAME`: the highest first). A run without the
    value is last. Raises UsageError with the position, or with the known names."""
    values = [values_of(record) for record in records]
    known = set(FIELDS).union(*values)
    chosen = list(zip(records, values, strict=True))
    if where:
        condition = _Condition(where, known)
        chosen = [(record, each) for record, each in chosen if condition.holds(each)]
    if sort:
        name = sort.removeprefix("-")
        if name not in known:
            raise UsageError(f"{name!r} is no field of a run", "--sort", _hint(name, known))
        having = [pair for pair in chosen if pair[1].get(name) not in (None, "")]
        having.sort(key=lambda pair: _order(pair[1][name]), reverse=sort.startswith("-"))
        chosen = having + [pair for pair in chosen if pair[1].get(name) in (None, "")]
    return [record for record, _ in chosen]


class _Condition:
    def __init__(self, text: str, known: set[str]) -> None:
        self._text, self._known = text, known
        if len(text) > LONGEST:
            raise UsageError(f"has {len(text):,} characters", "--where", f"use at most {LONGEST:,}")
        try:
            self._source = _QUOTED_OR_HYPHENATED.sub(
                lambda found: found[1] or found[0].replace("-", _HYPHEN), text.strip()
            )
            self._tree = ast.parse(self._source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None) or len(text.strip()) + 1
            raise self._refused(column, "cannot be read", "write such as: loss < 3 and tag == 'x'") from None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a run meets the condition."""
        return bool(self._truth(self._tree, values))

    def _truth(self, node: ast.expr, values: Mapping[str, Any]) -> bool:
        if isinstance(node, ast.BoolOp):
            results = [self._truth(part, values) for part in node.values]  # all, so that a wrong name is always found
            return all(results) if isinstance(node.op, ast.And) else any(results)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._truth(node.operand, values)
        if not isinstance(node, ast.Compare):
            return bool(self._field(node, values))
        left, results = self._field(node.left, values), []
        for kind, right in zip(node.ops, node.comparators, strict=True):
            value = self._literal(right, values)
            results.append(self._compare(kind, left, value, right))
            left = value
        return all(results)

    def _compare(self, kind: ast.cmpop, left: Any, right: Any, node: ast.expr) -> bool:
        compare = _COMPARE.get(type(kind))
        if compare is None:
            raise self._refused(self._column(node), "follows an unknown comparison", "use < <= > >= == != in")
        if isinstance(kind, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and (left is None or right is None):
            return False
        try:
            if isinstance(left, list):  # tags: one of them meets it, or all of them differ
                every = isinstance(kind, ast.NotEq | ast.NotIn)
                return (all if every else any)(compare(each, right) for each in left)
            return compare(left, right)
        except TypeError:
            message = f"is compared with {left!r}, which is of another kind"
            raise self._refused(self._column(node), message, "compare numbers with numbers, text with text") from None

    def _field(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        """The value of a field: the left side of a comparison, or a whole condition."""
        name = _dotted(node)
        if name is None:
            raise self._refused(self._column(node), "is no field", "write FIELD OPERATOR VALUE")
        if name not in self._known:
            raise self._refused(self._column(node), f"{name!r} is no field of a run", _hint(name, self._known))
        return values.get(name)

    def _literal(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        """A value: a number, a text, a list of them, or a word, which is a field if there is one of that name."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as positive)):
                return -positive
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self._literal(each, values) for each in node.elts]
        if (name := _dotted(node)) is not None:
            return values.get(name) if name in self._known else _WORDS.get(name.lower(), name)
        message = "is no value"
        raise self._refused(self._column(node), message, "put text with other characters in quotes: tag == 'a b'")

    def _column(self, node: ast.expr) -> int:
        """The position of a node, from 1. Python counts bytes."""
        return len(self._source.encode()[: node.col_offset].decode()) + 1

    def _refused(self, column: int, message: str, remedy: str) -> UsageError:
        return UsageError(f"{self._text.strip()!r}, position {column}: {message}", "--where", remedy)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id.replace(_HYPHEN, "-")
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr.replace(_HYPHEN, '-')}"
    return None


def _hint(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return (
        f"did you mean {close[0]!r}? " if close else ""
    ) + f"the fields are {', '.join(FIELDS)}, and those of the spec"


def _order(value: Any) -> tuple[int, Any]:
    """A key that orders numbers before texts."""
    return (0, value) if isinstance(value, int | float) else (1, str(value))
