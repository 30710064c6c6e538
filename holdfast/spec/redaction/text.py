"""Removal of secrets from texts, whole or in pieces, from JSON values, and of the values of secret variables."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from holdfast.spec.redaction import patterns
from holdfast.spec.redaction.named_values import redact_named_values
from holdfast.spec.redaction.patterns import HIDDEN, MOST, PARTS, looks_random, name_strength, names_secret

MAX_WORD = 64  # maximum characters of a text whose redacted form is cached
MIN_VALUE = 6  # minimum length of a variable's value that is removed wherever it occurs


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of variables with the name of a secret, and the passwords in variables with a URL or a header, longest
    first."""
    if environment is None:
        return _values_of_process()
    values: set[str] = set()
    for name, value in environment.items():
        if names_secret(name):
            values.update(_worth_hiding(value))
        elif "://" in value and (user := patterns.USER.search(value)):
            values.update(_worth_hiding(user[0].rstrip("@").partition(":")[2]))
        elif name.endswith(("_HEADER", "_HEADERS")):  # `Name: value`, or `name=value` several times
            for header in value.split(","):
                content = re.split(r"[:=]", header, maxsplit=1)[-1]
                for text in (content, unquote(content)):
                    secret = text.split(maxsplit=1)[-1:]  # after `Bearer`
                    if secret and looks_random(secret[0].strip()):
                        values.update(_worth_hiding(secret[0]))
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


_known: tuple[object, tuple[str, ...]] = (None, ())


def _values_of_process() -> tuple[str, ...]:
    """`secret_values` of this process, computed again only when a variable changes. Each text of each event needs them,
    and `os.environ` decodes all of its names and values at every read."""
    global _known  # noqa: PLW0603 - one tuple, replaced as a whole, so threads need no lock
    raw = vars(os.environ).get("_data")  # the undecoded variables: a dictionary that is compared in a microsecond
    now = dict(os.environ if raw is None else raw)
    before, values = _known
    if before != now:
        values = secret_values(dict(os.environ))
        _known = now, values
    return values


def _worth_hiding(value: str) -> Iterator[str]:
    value = value.strip()
    if len(value) >= MIN_VALUE and not patterns.PLACEHOLDERS.fullmatch(value.lower()) and not value.startswith("/"):
        yield from _spellings(value)


def _spellings(value: str) -> set[str]:
    """A value as it is, and as URLs, JSON, Python and shells write it. Bytes of a variable may be no UTF-8."""
    in_json = json.dumps(value)[1:-1]
    quoted = {quote(value, safe, errors="surrogateescape") for safe in ("", "/")}
    return {
        value, *quoted, *(text.replace("%20", "+") for text in quoted),
        in_json, json.dumps(in_json)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1], ascii(value)[1:-1], value.replace("\\", "\\\\").replace("'", "\\'"),
        value.replace("'", "'\\''"), value.replace("'", "'\"'\"'"),
    }  # fmt: skip


def redact(text: str, values: tuple[str, ...] | None = None) -> str:
    """`text` without secrets:

    - user names and passwords in URLs
    - the value after the name of a secret
    - text in the form of a known kind of key
    - the values of this process's variables with the name of a secret, or `values` instead of these
    """
    for value in secret_values() if values is None else values:
        if value in text:
            text = _without(text, value)
    return _redacted_word(text) if len(text) <= MAX_WORD else redact_text(text)


def redact_record(value: Any) -> Any:
    """A JSON value without secrets."""
    values = secret_values()

    def without(one: Any, name: str = "") -> Any:
        if isinstance(one, str):
            return HIDDEN if one and name and name_strength(name) == 2 else redact(one, values)
        if isinstance(one, Mapping):
            return {redact(str(key), values): without(item, str(key)) for key, item in one.items()}
        return [without(item, name) for item in one] if isinstance(one, list | tuple) else one

    return without(value)


def redact_text(text: str) -> str:
    if "PRIVATE KEY" in text:
        text = _without_private_keys(text)
    if "://" in text:
        text = patterns.USER.sub("", text)
    if "@" in text:
        text = patterns.SCP.sub(lambda found: f"{HIDDEN}@{found[0].rpartition('@')[2]}", text)
    lower = text.lower()

    def has(*words: str) -> bool:  # a quick check, so that a line without any of them costs almost nothing
        return any(word in lower for word in words)

    if has("hook", "azure", "telegram", "googleapis"):
        text = patterns.HOOKS.sub(rf"\g<1>{HIDDEN}", text)
    if has("auth"):
        text = patterns.PAIR.sub(rf"\g<1>{HIDDEN}", text)
    if has("=", ":", ",") and has(*PARTS):
        text = redact_named_values(text)
    if has("%3d", "%5f", "%2d", "%2e") and has(*PARTS):
        text = _without_encoded(text)
    text = patterns.SHAPES.sub(HIDDEN, text)
    if has("</"):
        text = patterns.XML.sub(lambda found: f"<{found[1]}>{HIDDEN}" if names_secret(found[1]) else found[0], text)
    if has("bearer"):
        text = patterns.BEARER.sub(lambda found: found[1] + (HIDDEN if looks_random(found[2]) else found[2]), text)
    if has("passw", "passphrase", "key", "identified"):
        text = patterns.PHRASE.sub(lambda found: found[1] + (HIDDEN if looks_random(found[2]) else found[2]), text)
    if has("password"):
        text = patterns.LOGIN.sub(rf"\g<1>{HIDDEN}", text)
    if has("-u", "-p", "--", *(f"-{part}" for part in PARTS)):
        text = patterns.OPTION.sub(_option, text)
        text = patterns.CURL.sub(rf"\g<1>{HIDDEN}", text)
    return patterns.WANDB.sub(rf"\g<1>{HIDDEN}", text) if has("wandb") else text


_redacted_word = lru_cache(maxsize=4096)(redact_text)  # sources, writers and names: few values, in every event of a run


def _without_encoded(text: str) -> str:
    parts, done = [], 0
    for found in patterns.ENCODED.finditer(text):
        name, separator = found.groups()
        is_plain = "%" not in name and separator == "="  # that of `redact_named_values`
        if found.start() < done or is_plain or not names_secret(unquote(name)):
            continue
        value = patterns.ENCODED_VALUE.match(text, found.end())
        if value and value[0] != HIDDEN:
            parts += [text[done : found.end()], HIDDEN]
            done = value.end()
    return "".join([*parts, text[done:]])


def _option(found: re.Match[str]) -> str:
    dashes, name, gap, value = found.groups()
    word = value.isalpha() and (len(value) <= 4 or value.isupper())
    if not names_secret(name) or word or patterns.NOTHING.match(value) or patterns.REFERENCE.match(value):
        return found[0]
    return f"{dashes}{name}{gap}{HIDDEN}"


def _without(text: str, value: str) -> str:
    """`text` without `value`. A value of letters only is removed only as a whole word."""
    if value.isalpha():
        return re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", HIDDEN, text)
    return text.replace(value, HIDDEN)


def _without_private_keys(text: str) -> str:
    parts, done = [], 0
    for begin in patterns.PEM.finditer(text):
        if begin.start() < done:
            continue
        end = patterns.PEM_END.search(text, begin.end(), begin.end() + 2 * MOST)
        last = end.end() if end else begin.end() + len(patterns.PEM_BODY.match(text, begin.end())[0].rstrip())  # type: ignore[index]
        hidden = "" if text.startswith(HIDDEN, begin.end()) else HIDDEN
        parts += [text[done : begin.end()], hidden]
        done = max(last, begin.end())
    return "".join([*parts, text[done:]])


def carries_secret(url: str) -> bool:
    """Whether a URL or a remote location contains credentials:

    - a password, or a user (the user of ssh://git@host does not count)
    - a query or a fragment, such as a signature (a `?` in the pattern of a path does not count)
    - text in the form of a secret
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return any(char in url for char in ":=-_.") and "\n" not in url and redact_text(url) != url
    place, _, fragment = rest.partition("#")
    place, question_mark, query = place.partition("?")
    if user_match := patterns.USER.search(url):
        user = user_match[0].rstrip("@")
        if ":" in user or "ssh" not in scheme:
            return True
        url = url.replace(user_match[0], "", 1)
    if "=" in query or "=" in fragment or (question_mark and query and scheme.startswith(("http", "ftp", "git"))):
        return True
    return (
        bool(patterns.SIGNATURE.fullmatch(query) or patterns.SIGNATURE.fullmatch(fragment)) or redact_text(url) != url
    )


class StreamRedactor:
    """Redacts a text that arrives in pieces. It redacts whole lines, and a private key across its lines."""

    def __init__(self) -> None:
        self._values = secret_values()
        self._kept = ""  # the beginning of a line without its end
        self._key = 0  # maximum number of lines of a private key that may follow

    def add(self, text: str) -> str:
        """Add text. Returns the complete part, redacted."""
        text = self._kept + text
        end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        if not end and len(text) > 8 * MOST:
            end = text.rfind(" ") + 1 or len(text)
        complete, self._kept = text[:end], text[end:]
        return self._lines(complete)

    def rest(self) -> str:
        """The rest: a line without its end."""
        text, self._kept = self._kept, ""
        return self._lines(text)

    def line(self, text: str) -> str:
        """A whole line, with or without its line end."""
        return self._lines(text)

    @property
    def waiting(self) -> bool:
        """Whether the last line has no end yet."""
        return bool(self._kept)

    def _lines(self, text: str) -> str:
        if not text:
            return ""
        if self._key:
            end = patterns.PEM_END.search(text)
            if end is None:
                lines = text.splitlines(keepends=True)
                hidden = [patterns.PEM_BODY.fullmatch(line) is not None for line in lines[: self._key]]
                count = hidden.index(False) if False in hidden else len(hidden)
                self._key = self._key - count if count == len(lines) else 0
                text = "".join(lines[count:])
            else:
                self._key, text = 0, text[end.end() :]
        begins = list(patterns.PEM.finditer(text))
        if begins and not patterns.PEM_END.search(text, begins[-1].end()):
            self._key = 400
        return redact(text, self._values)
