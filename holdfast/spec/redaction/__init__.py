"""Secrets in texts: names and forms that mark a secret, and removal of secrets from texts.

- Time grows linearly with the text. Well-formed JSON stays well-formed. Redacting twice changes nothing.
- Patterns are narrow enough to keep digests, run ids, store keys and token counts.
- A secret without a known name or form is not recognized, unless a variable with such a name holds it.
"""

from holdfast.spec.redaction.patterns import HIDDEN, names_secret
from holdfast.spec.redaction.text import StreamRedactor, carries_secret, redact, redact_record, secret_values

__all__ = [
    "HIDDEN",
    "StreamRedactor",
    "carries_secret",
    "names_secret",
    "redact",
    "redact_record",
    "secret_values",
]
