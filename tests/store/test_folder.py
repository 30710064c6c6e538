"""Objects as the files of one folder on this machine."""

from pathlib import Path

import boto3
import pytest

from holdfast.spec.errors import DataError
from holdfast.store import local_folder, open_store


def test_a_copy_is_that_of_its_store_and_whole(s3_url: str, tmp_path: Path) -> None:
    stores = [open_store(s3_url), open_store(f"{s3_url}/another")]
    for number, store in enumerate(stores):
        store.put("model/config.json", f"config {number}".encode())
        store.put("model/deep/weights", b"w")

    def folders() -> list[Path]:
        return [folder for store in stores if (folder := local_folder(store, "model", tmp_path)) is not None]

    assert [(folder / "config.json").read_text() for folder in folders()] == ["config 0", "config 1"]
    for folder in folders():
        assert (folder / "deep/weights").read_bytes() == b"w"
        (folder / "config.json").write_text("conf")  # incomplete
    assert [(folder / "config.json").read_text() for folder in folders()] == ["config 0", "config 1"]
    stores[0].put("model/config.json", b"config 2")
    assert (folders()[0] / "config.json").read_text() == "config 2"


def test_only_what_is_wanted_is_copied(s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_url)
    for name in ("a.json", "b.bin"):
        store.put(f"some/{name}", b"x")
    folder = local_folder(store, "some/", tmp_path, lambda name: name.endswith(".json"))
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["a.json"]


@pytest.mark.parametrize("first", ["config.json", "a/config.json"])
def test_a_local_folder_is_not_copied(tmp_path: Path, first: str) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    store.put(f"model/{first}", b"x")
    assert local_folder(store, "model", tmp_path / "copies") == tmp_path / "store/model"
    assert not (tmp_path / "copies").exists()


def test_where_there_is_nothing_there_is_no_folder(tmp_path: Path) -> None:
    assert local_folder(open_store(f"file://{tmp_path}"), "model", tmp_path) is None


def test_no_key_leads_out_of_the_copies_and_a_marker_of_a_folder_is_passed_over(s3_url: str, tmp_path: Path) -> None:
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", region_name="us-east-1")
    for key in ("model/", "model/config.json"):
        s3.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"x")
    store, copies = open_store(s3_url), tmp_path / "copies"
    folder = local_folder(store, "model", copies)
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    s3.put_object(Bucket=bucket, Key=f"{prefix}/model/../../out/weights", Body=b"x")
    with pytest.raises(DataError, match="delete that object"):
        local_folder(store, "model", copies)
    assert [path.name for path in tmp_path.iterdir()] == ["copies"]
