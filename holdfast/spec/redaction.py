"""Secrets in texts: names and forms that mark a secret, and removal of secrets from texts.

- Time grows linearly with the text. Well-formed JSON stays well-formed. Redacting twice changes nothing.
- Patterns are narrow enough to keep digests, run ids, store keys and token counts.
- A secret without a known name or form is not recognized, unless a variable with such a name holds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "(hidden)"
MIN_VALUE = 6  # minimum length of a variable's value that is removed wherever it occurs
MOST = 8192  # maximum characters of one secret
MAX_WORD = 64  # maximum characters of a text whose redacted form is cached

# --- names ---

_SPLIT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_ALWAYS = re.compile(
    r"webhook(?<!^webhook)|^webhook_|connection_?string|(?:^|_)dsn$|"
    r"(?:^|_)(?:db|database|postgres(?:ql)?|pg|my_?sql|maria_?db|mongo(?:_?db)?|redis|amqp|rabbitmq|broker|celery)_?"
    r"(?:url|uri)$"
)
_ABOUT = re.compile(  # names that describe a secret, and are not secrets
    r"_(?:file|path|dir|folder|name|names|ref|refs|type|types|length|len|count|counts|size|version|policy|mode|enabled|"
    r"ttl|expir[a-z]*|url|uri|host|port|endpoint|sock|field|fields|header|prefix|limit|kind|format|provider|class|"
    r"manager|store|required|optional|algorithm)$"
)
_STRONG = re.compile(
    r"passw|passphrase|secret(?!ar)|credential|authorization|bearer|(?:^|_)jwt(?:_|$)|cookie|(?:^|_)[a-z]*pwd(?:_|$)|"
    r"(?:api|access|private|account|signing|encryption|auth|client|shared|ssh|service|storage|session|master|license|"
    r"openai|anthropic|wandb|azure|gcp|aws|stripe|deploy|subscription|hmac)_?key|"
    r"(?:db|user|smtp|ssh|admin|root|ftp|mail|redis|pg|sql|http|proxy|login)_?pass$"
)
_WEAK = re.compile(r"(?:^|_)(?:[a-z]*token|auth|pw|pat|sas|sig|signature|creds?|key|webhook)$")
_STAGE = re.compile(r"_(?:prod|dev|test|staging|old|new|[0-9]+)$")
_OF_TEXT = re.compile(  # words before `token` that mean a token of a tokenizer
    r"bos|eos|pad|unk|unknown|mask|sep|cls|stop|end|start|begin|special|added|next|prev|previous|last|first"
    r"|per|each|image|audio|video|byte|control|fim|max|min|num|n|reserved|text|of|target|input|output|every"
    r"|sub|word|draft|bad|empty|blank|this|that"
)
_OF_DATA = re.compile(  # words before `KEY` that mean a data key, not a secret
    r"cache|sort|partition|primary|foreign|public|store|object|row|group|order|dict|host|map"
)
_HEADERS = re.compile(r"authorization$|cookie2?$")
_PARTS = (  # every name of a secret contains one of them
    "pass",
    "pwd",
    "pw",
    "secret",
    "cred",
    "token",
    "key",
    "auth",
    "bearer",
    "jwt",
    "cookie",
    "pat",
    "sas",
    "sig",
    "dsn",
    "webhook",
    "connection",
    "url",
    "uri",
    "code",
)
_IN_QUERY = frozenset(("key", "code", "auth", "pass", "pw"))  # names in the query of a URL


@lru_cache(4096)
def _strength(name: str) -> int:
    """How likely a name is that of a secret: 2 certain, 1 likely, 0 not."""
    normalised = _STAGE.sub("", _SPLIT.sub("_", name[-200:]).strip("_").lower())
    if normalised in ("pwd", "oldpwd"):  # in shells: the current folder
        return 0 if name.isupper() else 1
    about = _ABOUT.search(normalised) is not None
    if _ALWAYS.search(normalised) or (not about and _STRONG.search(normalised)):
        return 2
    return int(
        not about and _WEAK.search(normalised) is not None and _is_likely(name, *("", *normalised.split("_"))[-2:])
    )


def _is_likely(name: str, before: str, last: str) -> bool:
    if last == "key":
        return bool(before) and name.isupper() and not _OF_DATA.fullmatch(before)
    of_text = _OF_TEXT.fullmatch(before) or _OF_TEXT.fullmatch(last.removesuffix("token"))
    return not (last.endswith("token") and of_text)


def names_secret(name: str) -> bool:
    """Whether the name of a variable or a key means that its value is a secret."""
    return _strength(name) > 0


# --- forms ---

_NO_SPACE = r"(?:[^\s@:\"'\\<>]|:(?!//)|\\[^\s\"']|\\{0,8}[\"'](?!\\*[\s,:;}\])\"']|$))"
_USER = re.compile(
    r"(?<=://)(?:"
    r"[^\s/?#:@\"'\\\[\]<>]{0,256}:(?!//|\d{1,5}(?:[/?#\s\"'\\,;)\]}]|$))"  # a port, not a password
    rf"(?:{_NO_SPACE}{{1,256}}+[ ]){{0,3}}{_NO_SPACE}{{0,512}}+@(?:{_NO_SPACE}{{0,256}}+@){{0,8}}"
    r"|[^/?#\s'\"\\@:\[\]<>]{1,512}@"
    r"|@)"
)
_SCP = re.compile(
    r"(?<![\w./:@-])[A-Za-z_][\w.-]{0,63}:(?!/)[^\s@:\"'\\,]{3,256}@(?!sha\d)[A-Za-z0-9][\w.-]{0,253}(?=[:/])"
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    + "|".join(
        (
            r"hf_(?:[A-Za-z0-9]{30,200}|(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{10,200})",
            r"gh[pousr]_[A-Za-z0-9]{16,255}",
            r"github_pat_[A-Za-z0-9_]{16,255}",
            r"gl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{16,255}",
            r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,20}(?![A-Za-z0-9])",
            r"sk-(?=[\w-]{0,64}\d)[A-Za-z0-9][\w-]{15,255}",
            r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,255}",
            r"whsec_[A-Za-z0-9+/=]{16,255}",
            r"xox[a-z]-[\w-]{10,255}",
            r"xapp-[\w-]{10,255}",
            r"npm_[A-Za-z0-9]{30,255}",
            r"pypi-Ag[\w-]{20,512}",
            r"AIza[\w-]{30,255}",
            r"ya29\.[\w-]{16,512}",
            r"SG\.[\w-]{12,255}\.[\w-]{12,255}",
            r"dapi[0-9a-f]{32}",
            r"nvapi-[\w-]{20,255}",
            r"r8_[A-Za-z0-9]{30,255}",
            r"gsk_[A-Za-z0-9]{30,255}",
            r"hv[sb]\.[\w-]{20,255}",
            r"dckr_pat_[\w-]{16,255}",
            r"wandb_v\d_[\w-]{16,255}",
            r"eyJ[\w-]{8,4096}\.[\w-]{6,4096}(?:\.[\w-]{0,4096})?",
        )
    )
    + ")"
)
_HOOKS = re.compile(
    r"(?i)(hooks\.slack(?:-gov)?\.com/|discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/|"
    r"\.webhook\.office\.com/|outlook\.office(?:365)?\.com/webhook/|hooks\.zapier\.com/hooks/|"
    r"\.logic\.azure\.com(?::443)?/|chat\.googleapis\.com/v1/spaces/|api\.telegram\.org/(?:file/)?bot|"
    r"/hooks/(?=[a-z0-9]{20}))[^\s\"'<>\\)(]{1,2048}"
)
_WANDB = re.compile(r"(?i)(wandb[^\n]{0,80}?(?<![0-9a-z]))[0-9a-f]{40}(?![0-9a-z])")
_BEARER = re.compile(r"(?i)(\bbearer[ \t]{1,4})([\w.~+/=-]{8,4096})")
_LOGIN = re.compile(
    r"(?im)(\blogin\s{1,4}\S{1,256}\s{1,4}password\s{1,4}|^[ \t]{0,16}password[ \t]{1,4}(?=\S{1,256}[ \t]*$))"
    r"([^\s\"'\\]{1,256})"
)
_OPTION = re.compile(r"(?<![\w-])(--?)([A-Za-z][\w-]{1,63}+)([\"']?,?[ \t]{1,4}[\"']?)([^\s\"'\\-][^\s\"'\\]{0,512})")
_CURL = re.compile(r"(?<!\S)((?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"']{1,64}:)([^\s\"'\\]{1,256})")
_PHRASE = re.compile(
    r"(?i)((?:passw(?:or)?d|passphrase|(?:api|access|secret|private)[_ -]?key)(?: for [\w.@-]{1,64})?(?: is| was)?:?"
    r"[ \t]{1,4}[\"']?|\bidentified by [\"'])([^\s\"'\\]{6,256})"
)
_PAIR = re.compile(
    r"(?i)((?:auth[ ]?=[ ]?|basicauth|digestauth)\([ ]?[\"'][^\"'\n]{0,256}[\"'][ ]?,[ ]?b?[\"'])([^\"'\n]{1,1024})"
)
_XML = re.compile(r"<([A-Za-z][\w.:-]{1,63})>([^<>]{1,4096})(?=</\1>)")
_PEM = re.compile(r"-----BEGIN[^-\n]{0,40}PRIVATE KEY[^-\n]{0,20}-----")
_PEM_END = re.compile(r"-----END(?:[^-\n]{0,60}-----)?")
_PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s,:-]|\\[nr\\]){0,16384}")
_NAME = re.compile(
    r"(?<![\w.\-])([\w.\-]++)(\\*[\"'])?+(?:(\]?\s{0,4}(?:=>|:=|=(?!=)|:(?!:))\s{0,4})|(\s{0,2},\s{0,2})(?=b?\\*[\"']))"
)
_OPENS = re.compile(r"(?:[\[(]\s{0,2})?[bruf]?(\\*)([\"'])")
_BARE = re.compile(r"(?:[^\s\"'&\\;,]|[;,](?![\w .\-]{1,40}[=:])|\\\\|\\[^\"'\\nrtbfu\s])+")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|negotiate|apikey|key|aws4-hmac-sha256)[ \t]{1,4}(?=\S)")
_NOTHING = re.compile(r"(?i)(?:none|null|nil|true|false|undefined|yes|no|\*{2,}|x{3,}|\.{3}|)$")
_REFERENCE = re.compile(r"\$[\w({]|\{\{|%[({]|<[\w .-]{1,40}>$|\(hidden\)|\[|\{")
_BLOCK = re.compile(
    r"[|>][+-]?\d?[ ]*\n(?:[ \t]{1,64}[^\n]{0,4096}(?:\n|$)){1,64}|[|>][+-]?\d?[ ]*\\n[ \t]{1,64}[^\n\"\\]{0,4096}"
)
_PROSE = re.compile(r"(?i)(?:secrets|credentials?|^pass)$")
_OUTER = re.compile(r"\\*\"(?=\s{0,4}(?:[,:}\]]|$))")
_SENTENCE = re.compile(  # the first word of a sentence after a name and a colon
    r"(?:is|are|was|were|has|have|had|not|no|must|cannot|can|may|should|does|do|did|the|a|an|at|by|in|of|on|to|for|from|"
    r"with|without|wrong|missing|invalid|required|unknown|expired|denied|expected|unexpected|empty|given|set|use|please|"
    r"needs?|allowed|refused|value|text|use|looks|carries|it|this|that)[.?!]?$"
)
_CALL = re.compile(r"[A-Za-z_][\w.]{0,100}\(")
_REST = re.compile(r"[^\r\n\"'\\]*")
_LINE = re.compile(r"(?m)(?:^|[\"']|\\n)[ \t]{0,40}(?:- )?[\w.\-]{1,100}[ \t]{0,4}:[ \t]{0,4}\Z")
_KIND_OF_KEY = re.compile(r"(?i)(?:^|\W)(?:api|access|secret|private|account|auth) $")
_PLACEHOLDERS = re.compile(  # common words as values; removing them would hide nothing
    r"password|passwd|secret|secrets|changeme|default|example|testing|minioadmin|hidden|localhost|postgres"
    r"|holdfast|holdfast-secrets|username|token|string"
)


def _looks_random(value: str) -> bool:
    """Whether a value is not a word: it is long enough, and is not only letters of one case."""
    return len(value) >= 8 and (any(c.isdigit() for c in value) or value.lower() != value != value.capitalize())


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
    return _redacted_word(text) if len(text) <= MAX_WORD else _redacted(text)


def redact_record(value: Any) -> Any:
    """A JSON value without secrets."""
    values = secret_values()

    def without(one: Any, name: str = "") -> Any:
        if isinstance(one, str):
            return HIDDEN if one and name and _strength(name) == 2 else redact(one, values)
        if isinstance(one, Mapping):
            return {redact(str(key), values): without(item, str(key)) for key, item in one.items()}
        return [without(item, name) for item in one] if isinstance(one, list | tuple) else one

    return without(value)


def _redacted(text: str) -> str:
    if "PRIVATE KEY" in text:
        text = _without_private_keys(text)
    if "://" in text:
        text = _USER.sub("", text)
    if "@" in text:
        text = _SCP.sub(lambda found: f"{HIDDEN}@{found[0].rpartition('@')[2]}", text)
    lower = text.lower()

    def has(*words: str) -> bool:  # a quick check, so that a line without any of them costs almost nothing
        return any(word in lower for word in words)

    if has("hook", "azure", "telegram", "googleapis"):
        text = _HOOKS.sub(rf"\g<1>{HIDDEN}", text)
    if has("auth"):
        text = _PAIR.sub(rf"\g<1>{HIDDEN}", text)
    if has("=", ":", ",") and has(*_PARTS):
        text = _without_named(text)
    text = _SHAPES.sub(HIDDEN, text)
    if has("</"):
        text = _XML.sub(lambda found: f"<{found[1]}>{HIDDEN}" if names_secret(found[1]) else found[0], text)
    if has("bearer"):
        text = _BEARER.sub(lambda found: found[1] + (HIDDEN if _looks_random(found[2]) else found[2]), text)
    if has("passw", "passphrase", "key", "identified"):
        text = _PHRASE.sub(lambda found: found[1] + (HIDDEN if _looks_random(found[2]) else found[2]), text)
    if has("password"):
        text = _LOGIN.sub(rf"\g<1>{HIDDEN}", text)
    if has("-u", "-p", "--", *(f"-{part}" for part in _PARTS)):
        text = _OPTION.sub(_option, text)
        text = _CURL.sub(rf"\g<1>{HIDDEN}", text)
    return _WANDB.sub(rf"\g<1>{HIDDEN}", text) if has("wandb") else text


_redacted_word = lru_cache(maxsize=4096)(_redacted)  # sources, writers and names: few values, in every event of a run


def _option(found: re.Match[str]) -> str:
    dashes, name, gap, value = found.groups()
    word = value.isalpha() and (len(value) <= 4 or value.isupper())
    if not names_secret(name) or word or _NOTHING.match(value) or _REFERENCE.match(value):
        return found[0]
    return f"{dashes}{name}{gap}{HIDDEN}"


def _without(text: str, value: str) -> str:
    """`text` without `value`. A value of letters only is removed only as a whole word."""
    if value.isalpha():
        return re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", HIDDEN, text)
    return text.replace(value, HIDDEN)


def _without_private_keys(text: str) -> str:
    parts, done = [], 0
    for begin in _PEM.finditer(text):
        if begin.start() < done:
            continue
        end = _PEM_END.search(text, begin.end(), begin.end() + 2 * MOST)
        last = end.end() if end else begin.end() + len(_PEM_BODY.match(text, begin.end())[0].rstrip())  # type: ignore[index]
        hidden = "" if text.startswith(HIDDEN, begin.end()) else HIDDEN
        parts += [text[done : begin.end()], hidden]
        done = max(last, begin.end())
    return "".join([*parts, text[done:]])


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
        return _HEADERS.search(self.name.lower()) is not None


_Hidden = tuple[int, int, str]  # start, end, and replacement


def _without_named(text: str) -> str:
    parts, done = [], 0
    for match in _NAME.finditer(text):
        if match.start() < done:
            continue
        strength = _strength(match[1]) or _strength_here(text, match)
        if not strength or (match[3] is None and not _is_pair(text, match)):
            continue
        named = _Named(match[1], match[2] or "", (match[3] or ":").strip(), strength)
        if (
            hidden := _quoted(text, match.end(), named)
            if _OPENS.match(text, match.end())
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
    in_query = name in _IN_QUERY and found[3] == "=" and before[-1:] in ("?", "&")
    return int(in_query or (name == "key" and _KIND_OF_KEY.search(before) is not None))


def _is_pair(text: str, found: re.Match[str]) -> bool:
    """Whether a name and the text after its comma are a pair (a header or an option), and not items of a list."""
    quote = _OPENS.match(text, found.end())
    if not found[2] or not quote or text[found.start() - 1 : found.start()] != found[2][-1]:
        return False
    header = _HEADERS.search(found[1].lower()) or found[1].startswith(("--", "x-", "X-"))
    return bool(header) or _looks_random(text[quote.end() : quote.end() + 64])


def _quoted(text: str, at: int, named: _Named) -> _Hidden | None:
    """A value in quotes. None if it needs no hiding."""
    quote = _OPENS.match(text, at)
    assert quote is not None
    start, end = quote.end(), _closing(text, quote.end(), len(quote[1]), quote[2])
    value = text[start:end]
    word = named.strength == 1 and named.separator == ":" and not named.mark and not _looks_random(value)
    return None if word or _NOTHING.match(value) or _REFERENCE.match(value) else (start, end, HIDDEN)


def _bare(text: str, at: int, named: _Named) -> _Hidden | None:
    """A value without quotes. None if it needs no hiding."""
    if (block := _BLOCK.match(text, at)) and named.separator == ":":
        return at, block.end(), HIDDEN + ("\n" if "\n" in block[0] else "")
    scheme = _SCHEME.match(text, at)
    begin = scheme.end() if scheme else at
    bare = _BARE.match(text, begin, begin + MOST)
    value = bare[0] if bare else ""
    value = value if value.startswith(HIDDEN) else value.rstrip(",;:)]}>")
    line = named.separator == ":" and named.strength == 2 and _begins_line(text, at)
    if not value or _is_plain(value, named, scheme is not None, line):
        return None
    end = begin + len(value)
    if named.mark and named.separator == ":":  # of a JSON object, which takes no bare word
        return at, end, f"{named.mark}{HIDDEN}{named.mark}" if _is_number(value) else HIDDEN
    if (line or named.is_header) and (rest := _REST.match(text, begin, begin + MOST)):
        end = max(end, begin + len(rest[0].rstrip()))
    return begin if named.strength == 2 else at, end, HIDDEN


def _is_plain(value: str, named: _Named, has_scheme: bool, is_line: bool) -> bool:
    """Whether a bare value needs no hiding: nothing, a reference, a number of tokens, a word of a sentence, a call."""
    if _NOTHING.match(value) or _REFERENCE.match(value):
        return True
    if _PROSE.search(named.name) and not _looks_random(value):
        return True
    if named.strength == 2:
        return not is_line and named.separator == ":" and _SENTENCE.match(value) is not None
    path = named.name.lower() == "pwd" and value[0] in "/~."
    number = _is_number(value) and (bool(named.mark) or (len(value) <= 10 and named.name.lower() not in ("pw", "pass")))
    word = not (named.separator == "=" or has_scheme or _looks_random(value))
    return path or number or word or _CALL.match(value) is not None


def _is_number(value: str) -> bool:
    return value.replace(".", "").isdigit()


def _begins_line(text: str, at: int) -> bool:
    """Whether only one name is before `at` in the line or the quoted text, as in YAML."""
    return _LINE.search(text[max(0, at - 160) : at]) is not None


def _closing(text: str, start: int, depth: int, mark: str) -> int:
    """The end of the quoted text that begins at `start`: before its closing mark, which follows `depth` backslashes, or
    the end of the line."""
    line = text.find("\n", start, start + MOST)
    last = line if line >= 0 else min(len(text), start + MOST)
    if mark == "'" and (outer := _OUTER.search(text, start, last)):  # the end of the JSON text around this one
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


# --- values of variables ---


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of variables with the name of a secret, and the passwords in variables with a URL, longest first."""
    if environment is None:
        return _values_of_process()
    values: set[str] = set()
    for name, value in environment.items():
        if names_secret(name):
            values.update(_worth_hiding(value))
        elif "://" in value and (user := _USER.search(value)):
            values.update(_worth_hiding(user[0].rstrip("@").partition(":")[2]))
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
    if len(value) >= MIN_VALUE and not _PLACEHOLDERS.fullmatch(value.lower()) and not value.startswith("/"):
        yield value
        for other in (quote(value, safe=""), value.replace("\\", "\\\\").replace('"', '\\"')):
            if other != value:
                yield other


# --- URLs of a spec ---

_WORD = re.compile(r"(?=[^\d]*\d)[A-Za-z0-9_=-]{16,}")


def carries_secret(url: str) -> bool:
    """Whether a URL or a remote location contains credentials:

    - a password, or a user (the user of ssh://git@host does not count)
    - a query or a fragment, such as a signature (a `?` in the pattern of a path does not count)
    - text in the form of a secret
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return any(char in url for char in ":=-_.") and "\n" not in url and _redacted(url) != url
    place, _, fragment = rest.partition("#")
    place, question_mark, query = place.partition("?")
    if user_match := _USER.search(url):
        user = user_match[0].rstrip("@")
        if ":" in user or "ssh" not in scheme:
            return True
        url = url.replace(user_match[0], "", 1)
    if "=" in query or "=" in fragment or (question_mark and query and scheme.startswith(("http", "ftp", "git"))):
        return True
    return bool(_WORD.fullmatch(query) or _WORD.fullmatch(fragment)) or _redacted(url) != url


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
            end = _PEM_END.search(text)
            if end is None:
                lines = text.splitlines(keepends=True)
                hidden = [_PEM_BODY.fullmatch(line) is not None for line in lines[: self._key]]
                count = hidden.index(False) if False in hidden else len(hidden)
                self._key = self._key - count if count == len(lines) else 0
                text = "".join(lines[count:])
            else:
                self._key, text = 0, text[end.end() :]
        begins = list(_PEM.finditer(text))
        if begins and not _PEM_END.search(text, begins[-1].end()):
            self._key = 400
        return redact(text, self._values)
