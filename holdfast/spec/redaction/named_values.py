"""Removal of values that follow the name of a secret, in the notations of shells, JSON, YAML, code and headers."""

import re
from dataclasses import dataclass

from holdfast.spec.redaction import patterns
from holdfast.spec.redaction.patterns import HEADERS, HIDDEN, IN_QUERY, MOST, looks_random, name_strength


@dataclass(frozen=True)
class _Named:
    """The name of a secret in a text."""

    name: str
    mark: str  # closes the name if it is quoted
    separator: str  # "=", ":" or the like
    strength: int

    @property
    def is_header(self) -> bool:
        """Whether its value is the whole line."""
        return HEADERS.search(self.name.lower()) is not None


_Hidden = tuple[int, int, str]  # start, end, and replacement


def redact_named_values(text: str) -> str:
    parts, done = [], 0
    for match in patterns.NAME.finditer(text):
        if match.start() < done:
            continue
        strength = name_strength(match[1]) or _strength_here(text, match)
        if not strength or (match[3] is None and not _is_pair(text, match)):
            continue
        named = _Named(match[1], match[2] or "", (match[3] or ":").strip(), strength)
        if (
            hidden := _quoted(text, match.end(), named)
            if patterns.OPENS.match(text, match.end())
            else _bare(text, match.end(), named)
        ):
            start, end, put = hidden
            parts += [text[done:start], put]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def _strength_here(text: str, found: re.Match[str]) -> int:
    """How likely a name is that of a secret because of its position: in a query, or after another word."""
    name, before = found[1].lower(), text[max(0, found.start() - 9) : found.start()]
    if name == "pass":
        return 2 if found[1].isupper() else 1
    in_query = name in IN_QUERY and found[3] == "=" and before[-1:] in ("?", "&")
    return int(in_query or (name == "key" and patterns.KIND_OF_KEY.search(before) is not None))


def _is_pair(text: str, found: re.Match[str]) -> bool:
    """Whether a name and the text after its comma are a pair (a header or an option), and not items of a list."""
    quote = patterns.OPENS.match(text, found.end())
    if not found[2] or not quote or text[found.start() - 1 : found.start()] != found[2][-1]:
        return False
    header = HEADERS.search(found[1].lower()) or found[1].startswith(("--", "x-", "X-"))
    return bool(header) or looks_random(text[quote.end() : quote.end() + 64])


def _quoted(text: str, at: int, named: _Named) -> _Hidden | None:
    """A value in quotes. None if it needs no hiding."""
    quote = patterns.OPENS.match(text, at)
    assert quote is not None
    start, end = quote.end(), _closing(text, quote.end(), len(quote[1]), quote[2])
    value = text[start:end]
    word = named.strength == 1 and named.separator == ":" and not named.mark and not looks_random(value)
    return None if word or patterns.NOTHING.match(value) or patterns.REFERENCE.match(value) else (start, end, HIDDEN)


def _bare(text: str, at: int, named: _Named) -> _Hidden | None:
    """A value without quotes. None if it needs no hiding."""
    if (block := patterns.BLOCK.match(text, at)) and named.separator == ":":
        return at, block.end(), HIDDEN + ("\n" if "\n" in block[0] else "")
    scheme = patterns.SCHEME.match(text, at)
    begin = scheme.end() if scheme else at
    bare = patterns.BARE.match(text, begin, begin + MOST)
    value = bare[0] if bare else ""
    value = value if value.startswith(HIDDEN) else value.rstrip(",;:)]}>")
    line = named.separator == ":" and named.strength == 2 and _begins_line(text, at)
    if not value or _is_plain(value, named, scheme is not None, line):
        return None
    end = begin + len(value)
    if named.mark and named.separator == ":":  # of a JSON object, which takes no bare word
        return at, end, f"{named.mark}{HIDDEN}{named.mark}" if _is_number(value) else HIDDEN
    if (line or named.is_header) and (rest := patterns.REST.match(text, begin, begin + MOST)):
        end = max(end, begin + len(rest[0].rstrip()))
    return begin if named.strength == 2 else at, end, HIDDEN


def _is_plain(value: str, named: _Named, has_scheme: bool, is_line: bool) -> bool:
    """Whether a bare value needs no hiding: nothing, a reference, a number of tokens, a word of a sentence, a call."""
    if patterns.NOTHING.match(value) or patterns.REFERENCE.match(value):
        return True
    if patterns.PROSE.search(named.name) and not looks_random(value):
        return True
    if named.strength == 2:
        return not is_line and named.separator == ":" and patterns.SENTENCE.match(value) is not None
    path = named.name.lower() == "pwd" and value[0] in "/~."
    number = _is_number(value) and (bool(named.mark) or (len(value) <= 10 and named.name.lower() not in ("pw", "pass")))
    word = not (named.separator == "=" or has_scheme or looks_random(value))
    return path or number or word or patterns.CALL.match(value) is not None


def _is_number(value: str) -> bool:
    return value.replace(".", "").isdigit()


def _begins_line(text: str, at: int) -> bool:
    """Whether only one name is before `at` in the line or the quoted text, as in YAML."""
    return patterns.LINE.search(text[max(0, at - 160) : at]) is not None


def _closing(text: str, start: int, depth: int, mark: str) -> int:
    """The end of the quoted text that begins at `start`: before its closing mark, which follows `depth` backslashes, or
    the end of the line."""
    line = text.find("\n", start, start + MOST)
    last = line if line >= 0 else min(len(text), start + MOST)
    if mark == "'" and (outer := patterns.OUTER.search(text, start, last)):  # the end of the JSON text around this one
        last = outer.start()
    at = start
    while (at := text.find(mark, at, last)) >= 0:
        before = at
        while before > start and text[before - 1] == "\\":
            before -= 1
        if depth == 0 and start < at and at == before and text[at + 1 : at + 2] == mark:  # doubled, as in SQL and YAML
            at += 2
            continue
        if at - before <= depth or (depth == 0 and (at - before) % 2 == 0):
            return before if depth else at
        at += 1
    return last
