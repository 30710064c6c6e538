"""Texts that people read carry no secrets: URLs lose their user names, passwords and signatures.

Promises to leave everything else as it is, and JSON that was well-formed well-formed. Leaves secrets that stand in no
URL and under no telling name to whoever knows them.
"""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
_USER = re.compile(r"(?<=://)[^/?#\s'\"\\]*@")  # to the last @ before the path: a password may hold one
_VALUE = re.compile(
    r"(?i)((?:signature|credential|token|password|\bsig|access_?key_?id|secret(?:[_-]?access)?(?:[_-]?key)?)=)"
    r"[^&\s\"'\\]+"
)


def redact(text: str) -> str:
    """`text`, a URL or one that holds some, without user:password in URLs and without the values of signatures, tokens
    and passwords."""
    return _VALUE.sub(rf"\g<1>{HIDDEN}", _USER.sub("", text))
