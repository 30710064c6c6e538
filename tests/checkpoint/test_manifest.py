"""The manifest: intact, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.components.checkpoint.manifest import Manifest, UnfitError, _digest
from holdfast.components.spec.errors import DataError
from holdfast.components.store import Store, layout
from tests.checkpoint.saving import RUN, checkpointer, save


@pytest.fixture
def body(folder_store: Store) -> dict[str, Any]:
    save(checkpointer(folder_store), 3)
    parsed: dict[str, Any] = json.loads(folder_store.get(layout.checkpoint(RUN, 3)))
    return parsed


def sealed(body: dict[str, Any]) -> bytes:
    """A manifest that says `body`, with a digest that fits."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    return json.dumps({**rest, "digest": _digest(rest)}).encode()


def test_a_manifest_is_read_back_as_it_was_written(body: dict[str, Any]) -> None:
    manifest = Manifest.from_bytes(sealed(body), "m")
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest
    assert manifest.step == 3
    assert manifest.scalars == {"optimizer.step": 3}


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"3", b'"x"', b"{}", b"\xff\xfe", b'{"version": 1}'])
def test_what_is_not_a_manifest_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DataError, match=r"^the-key: the manifest is torn"):
        Manifest.from_bytes(data, "the-key")


def test_a_changed_field_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="does not match its own digest"):
        Manifest.from_bytes(json.dumps(body | {"step": 4}).encode(), "m")


def test_a_newer_format_asks_for_an_upgrade_and_is_no_damage(body: dict[str, Any]) -> None:
    with pytest.raises(UnfitError, match="format version 2 is newer than 1; upgrade"):
        Manifest.from_bytes(sealed(body | {"version": 2, "another": "field"}), "m")


def _change(body: dict[str, Any], tensor: str, **fields: Any) -> dict[str, Any]:
    record = body["tensors"][tensor]
    piece = record["pieces"][0] | {key: value for key, value in fields.items() if key in record["pieces"][0]}
    changed = record | {"pieces": [piece, *record["pieces"][1:]]} | fields.get("record", {})
    return body | {"tensors": body["tensors"] | {tensor: changed}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shape": [6, 5]}, "its pieces hold 30 of 35 elements"),
        ({"shape": [5, 7]}, "lies outside"),
        ({"shape": [-7, -5]}, "lies outside"),
        ({"offset": [1, 0]}, "lies outside"),
        ({"offset": [0]}, "lies outside"),
        ({"offset": [-1, 0]}, "lies outside"),
        ({"length": 139}, "has 139 bytes for float32"),
        ({"start": -1}, "greater than or equal to 0"),
        ({"pack": "../../secrets"}, "string_pattern_mismatch|should match pattern"),
        ({"digest": "short"}, "should match pattern"),
        ({"codec": "pickle"}, "Input should be 'raw'"),
        ({"record": {"dtype": "float64"}}, "has 140 bytes for float64"),
        ({"record": {"dtype": "object"}}, "Input should be 'float32'"),
        ({"record": {"shape": [7, 6]}}, "its pieces hold 35 of 42 elements"),
        ({"record": {"pieces": []}}, "its pieces hold 0 of 35 elements"),
    ],
)
def test_lying_shapes_and_places_are_refused(body: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Manifest.from_bytes(sealed(_change(body, "matrix", **fields)), "m")


@pytest.mark.parametrize(
    ("one", "other"),
    [(((0, 0), (2, 4)), ((0, 0), (2, 4))), (((0, 0), (2, 4)), ((1, 0), (2, 4))), (((0, 0), (4, 2)), ((0, 1), (4, 2)))],
)
def test_pieces_that_overlap_leave_a_hole_and_are_refused(
    body: dict[str, Any], one: tuple[Any, Any], other: tuple[Any, Any]
) -> None:
    piece = body["tensors"]["matrix"]["pieces"][0] | {"length": 32}
    pieces = [piece | {"offset": list(offset), "shape": list(shape)} for offset, shape in (one, other)]
    changed = _change(body, "matrix", record={"shape": [4, 4], "pieces": pieces})
    with pytest.raises(DataError, match="its pieces overlap"):
        Manifest.from_bytes(sealed(changed), "m")
