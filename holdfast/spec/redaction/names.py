"""Names of variables and keys that mean that a value is a secret."""

from __future__ import annotations

import re
from functools import lru_cache

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
HEADERS = re.compile(r"authorization$|cookie2?$")
# Every name of a secret contains one of them.
PARTS = tuple(
    """
    pass pwd pw secret cred token key auth bearer jwt cookie pat sas sig dsn webhook connection url uri code
    """.split()
)
IN_QUERY = frozenset("key code auth pass pw".split())  # names in the query of a URL


@lru_cache(4096)
def name_strength(name: str) -> int:
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
    return name_strength(name) > 0
