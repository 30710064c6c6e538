"""Texts that leave a process carry no secrets: one redaction for every exit.

What a secret looks like, and its promises, are `holdfast.components.spec.redaction`'s, which the messages of errors
need as well.
"""

from holdfast.components.spec.redaction import HIDDEN, StreamRedactor, redact, redact_record, secret_values

__all__ = ["HIDDEN", "StreamRedactor", "redact", "redact_record", "secret_values"]
