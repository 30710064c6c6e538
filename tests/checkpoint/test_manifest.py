"""The manifest: intact, or refused with a reason."""

import json
from typing import Any

import pytest

from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.root import UnfitError, body_digest
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout
from tests.checkpoint.saving import RUN, checkpointer, save


@pytest.fixture
def body(folder_store: Store) -> dict[str, Any]:
    save(checkpointer(folder_store), 3)
    parsed: dict[str, Any] = json.loads(folder_store.get(layout.checkpoint(RUN, 3)))
    return parsed


def sealed(body: dict[str, Any]) -> bytes:
    """A manifest with `body` and a matching digest."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    return json.dumps({**rest, "digest": body_digest(rest)}, separators=(",", ":")).encode()


def test_a_manifest_is_read_back_as_it_was_written(body: dict[str, Any]) -> None:
    manifest = Manifest.from_bytes(sealed(body), "m")
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest
    assert manifest.step == 3
    assert manifest.scalars == {"optimizer.step": 3}


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"3", b'"x"', b"{}", b"\xff\xfe", b'{"version": 1}'])
def test_an_invalid_manifest_is_refused_with_its_key(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^the-key: the manifest is torn"):
        Manifest.from_bytes(data, "the-key")


def test_the_same_values_in_other_bytes_are_refused(body: dict[str, Any]) -> None:
    """A flipped bit in the last digit of a number may not change its value, nor the digest of the values."""
    data = sealed(body)
    for other in (data.replace(b'"step":3', b'"step": 3', 1), data.replace(b'"step":3,', b'"step":9,"step":3,', 1)):
        assert other != data
        with pytest.raises(DataError, match="is not as it was written"):
            Manifest.from_bytes(other, "m")


def test_a_changed_field_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="does not match its own digest"):
        Manifest.from_bytes(json.dumps(body | {"step": 4}).encode(), "m")


def test_a_newer_manifest_format_requires_an_upgrade_and_is_not_damage(body: dict[str, Any]) -> None:
    with pytest.raises(UnfitError, match="format version 3 is newer than 2; upgrade"):
        Manifest.from_bytes(sealed(body | {"version": 3, "another": "field"}), "m")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensors": {"b": {"shape": [1], "dtype": "float32"}, "a": {"shape": [1], "dtype": "float32"}}}, "order"),
        ({"tensors": {"a": {"shape": [-1], "dtype": "float32"}}}, "has the shape"),
        ({"tensors": {"a": {"shape": [2**40, 2**40], "dtype": "float32"}}}, "too many elements"),
        ({"tensors": {"a": {"shape": [1], "dtype": "object"}}}, "Input should be 'float32'"),
        ({"tensors": {}}, "is not over these 0 tensors"),
        ({"writers": 0}, "greater than or equal to 1"),
        ({"another": "field"}, "Extra inputs are not permitted"),
    ],
)
def test_lying_tensors_are_refused(body: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Manifest.from_bytes(sealed(body | change), "m")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "../../secrets"}, "should match pattern"),
        ({"name": "000001-000000003/../00000.idx"}, "should match pattern"),
        ({"size": -1}, "greater than or equal to 0"),
        ({"digest": "short"}, "should match pattern"),
        ({"reach": {"tensors": "ff", "spans": []}}, "is not over these 9 tensors"),
        ({"reach": {"tensors": "f", "spans": []}}, "should match pattern"),
    ],
)
def test_lying_entries_are_refused(body: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Manifest.from_bytes(sealed(body | {"indexes": [body["indexes"][0] | change]}), "m")


def test_a_root_of_more_children_than_a_node_has_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="33 children, at most 32"):
        Manifest.from_bytes(sealed(body | {"indexes": body["indexes"] * 33}), "m")
