"""Sealed messages that only processes of one launch can write: a shared key, and an HMAC before each message.

A launch with several nodes has its own key, in HOLDFAST_LAUNCH_KEY of each node's torchrun. The key is in no spec,
record, log or command line. Ranks get keys that are derived from it, each for one purpose. A message with another key,
for another purpose, or longer than its reader allows is refused before it is parsed.
"""

import hmac
import secrets

VARIABLE = "HOLDFAST_LAUNCH_KEY"
NEAR_VARIABLE = "HOLDFAST_NEAR_KEY"  # of ranks: opens the local tiers of the launch's other nodes
MIN_CHARACTERS = 32
_HASH = "sha256"
_SIZE = 32  # bytes of an HMAC


def new_key() -> str:
    """A key for one launch."""
    return secrets.token_hex(32)


def derive_key(key: str, purpose: str) -> str:
    """A key for one purpose, which does not reveal `key`."""
    return hmac.digest(key.encode(), f"holdfast {purpose}".encode(), _HASH).hex()


def seal(key: str, purpose: str, message: bytes) -> bytes:
    """The message with its HMAC before it."""
    return _mac(key, purpose, message) + message


def unseal(key: str, purpose: str, sealed: bytes, most: int) -> bytes:
    """The message that was sealed with this key for this purpose, at most `most` bytes long. Raises ValueError."""
    if not _SIZE <= len(sealed) <= _SIZE + most:
        raise ValueError(f"a sealed message of {len(sealed)} bytes, where {_SIZE} to {_SIZE + most} are allowed")
    message = sealed[_SIZE:]
    if not hmac.compare_digest(sealed[:_SIZE], _mac(key, purpose, message)):
        raise ValueError("a message that no process of this launch has written")
    return message


def _mac(key: str, purpose: str, message: bytes) -> bytes:
    return hmac.digest(key.encode(), f"{len(purpose)} {purpose} ".encode() + message, _HASH)
