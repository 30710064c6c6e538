"""Messages that only processes of one launch can write."""

import pytest

from holdfast.runtime.sealing import derive_key, new_key, seal, unseal


def test_a_sealed_message_is_read_with_its_key_and_for_its_purpose_alone() -> None:
    key = new_key()
    sealed = seal(key, "verdict", b"words")
    assert unseal(key, "verdict", sealed, 5) == b"words"
    for other in (
        (new_key(), "verdict", sealed, 5),
        (key, "another purpose", sealed, 5),
        (key, "verdict", sealed, 4),  # longer than its reader allows
        (key, "verdict", sealed[:-1] + b"z", 5),
        (key, "verdict", b"", 5),
    ):
        with pytest.raises(ValueError, match=r"sealed message|no process of this launch"):
            unseal(*other)


def test_the_end_of_a_purpose_cannot_be_moved_into_the_message() -> None:
    key = new_key()
    with pytest.raises(ValueError, match="no process"):
        unseal(key, "a", seal(key, "a b", b"c")[:32] + b"b c", 10)


def test_derived_keys_differ_by_purpose_and_from_their_key() -> None:
    key = new_key()
    derived = {derive_key(key, "near copies"), derive_key(key, "rendezvous id")}
    assert len({key, new_key(), *derived}) == 4
