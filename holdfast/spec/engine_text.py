"""Texts that pass through a pipeline engine: an encoding that no engine changes.

Replacements by the engines (sources: docs/decisions/022-text-through-engines.md):

- Argo's controller replaces `{{...}}` and `{{=...}}` in every text of a Workflow: parameters, arguments, environment,
  annotations, and again in the text that it inserted. It fails on a text with some unprintable characters.
- KFP's API server replaces `[[RunUUID]]` and similar names in text parameters. KFP compiles to Argo, so the above also
  applies. Its driver, its launcher and `kfp.local` replace `{{$...}}`, and `/kfp-workspace` mounts a volume.
- The kubelet replaces `$(NAME)` and turns `$$` into `$` in the arguments and variables of a container.
- Ray replaces `$NAME` and `${NAME}` in the variables of a job.

`escape` writes the first character of such a sequence as a visible escape, such as `\u007b`. Nothing else changes, so
ordinary text stays the same. `unescape` returns exactly the original text. Both work on any text, so they also work on
the strings inside a dictionary (`escape_tree`), which KFP passes as a STRUCT.
"""

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from holdfast.spec import strict_yaml

VARIABLE = "HOLDFAST_ESCAPED"  # names of the escaped variables, separated by spaces
# The escapes that `unescape` reads: those of `{ [ $ / \`, of control characters, and of characters beyond U+FFFF.
_ESCAPES = r"u00(?:7[bf]|5[bc]|24|2f|0[0-8bcef]|1[0-9a-f]|[89][0-9a-f])|U00(?:0[1-9a-f]|10)[0-9a-f]{4}"
_UNPRINTABLE = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|[\U00010000-\U0010ffff]"
_TEMPLATES = rf"\\(?={_ESCAPES})|\{{(?=\{{)|\[(?=\[\w)|/(?=kfp-workspace)|{_UNPRINTABLE}"
_FOR_ENGINES = re.compile(rf"{_TEMPLATES}|\$(?=[($])")
_FOR_KUBELET = re.compile(r"\$(?=[($])")
_FOR_RAY = re.compile(rf"{_TEMPLATES}|\$")
_ESCAPED = re.compile(rf"\\(?:{_ESCAPES})")
_BY_ARGO = re.compile(rf"\{{\{{|{_UNPRINTABLE}")


def escape(text: str) -> str:
    """The text in a form that Argo, KFP and the kubelet pass on unchanged."""
    return _FOR_ENGINES.sub(_escape_one, text)


def escape_for_ray(text: str) -> str:
    """The text in a form that Ray passes on unchanged in a variable."""
    return _FOR_RAY.sub(_escape_one, text)


def unescape(text: str) -> str:
    """The text that was passed to `escape` or `escape_for_ray`. A text without escapes stays the same."""
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), text)


def escape_tree(value: Any) -> Any:
    """A JSON value with every string escaped, including the keys of dictionaries."""
    return _map_strings(value, escape)


def unescape_tree(value: Any) -> Any:
    """The value that was passed to `escape_tree`. A value that is not JSON stays the same."""
    return _map_strings(value, unescape)


def is_replaced_by_argo(text: str) -> bool:
    """Whether Argo, and with it KFP, would change this text or fail on it."""
    return any(len(match[0]) > 1 or not _is_harmless(match[0]) for match in _BY_ARGO.finditer(text))


def double_dollars(text: str) -> str:
    """A text for an argument or a variable of a container that the kubelet converts to `text`."""
    return _FOR_KUBELET.sub("$$", text)


def escape_environment(variables: Mapping[str, str], escaped: Callable[[str], str] = escape) -> dict[str, str]:
    """Variables of a step, in a form that engines pass on unchanged. `VARIABLE` names the changed ones."""
    escaped_variables = {name: escaped(value) for name, value in variables.items()}
    changed = sorted(name for name, value in escaped_variables.items() if value != variables[name])
    return escaped_variables | ({VARIABLE: " ".join(changed)} if changed else {})


def restore_environment(variables: MutableMapping[str, str] = os.environ) -> None:
    """Undo `escape_environment` in this process, before anything reads its variables."""
    for name in variables.pop(VARIABLE, "").split():
        if name in variables:
            variables[name] = unescape(variables[name])


def _escape_one(found: re.Match[str]) -> str:
    character = found[0]
    if _is_harmless(character):
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def _is_harmless(character: str) -> bool:
    """Whether a character beyond U+FFFF is one that Go does not escape."""
    return ord(character) > 0xFFFF and character.isprintable()


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(name, change): _map_strings(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


# A spec as a protobuf Struct, which KFP uses for a dictionary.
#
# A Struct has one kind of number, a double, and does not keep the order of names. KFP's compiler accepts no null in it.
#
# - `to_struct` writes whole numbers that a double cannot hold as text, which `parse_spec` reads as the same number. It
# writes null as the text "(null)".
# - `from_struct` converts whole doubles to whole numbers, and that text to null.

EXACT = 2**53  # a double can hold every whole number up to here
NULL = "(null)"
_LIKE_NULL = re.compile(r"\(+null\)+")  # such a text gets extra parentheses in a Struct


def to_struct(value: Any) -> Any:
    """A JSON value in a form that a Struct can hold without loss."""
    if value is None:
        return NULL
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return f"({value})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    return _each(value, to_struct)


def from_struct(value: Any) -> Any:
    """The value that was passed to `to_struct`, for `parse_spec`."""
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return None if value == NULL else value[1:-1]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return _each(value, from_struct)


def text_of(spec: str | Mapping[str, Any]) -> str:
    """A spec as YAML text, from YAML text or a dictionary."""
    return spec if isinstance(spec, str) else strict_yaml.write(from_struct(spec))


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: change(item) for name, item in value.items()}
    return [change(item) for item in value] if isinstance(value, (list, tuple)) else value
