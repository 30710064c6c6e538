"""The sources of text, with real S3 and real DVC, and user-provided tokenizers."""

import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import boto3
import pytest

from holdfast.components.preprocess import run
from holdfast.corpus import Prepared, identify
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout, open_store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl
from tests.dvc_repository import commit


@pytest.fixture
def bucket(s3_endpoint: str) -> Store:
    name = f"corpus-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return open_store(f"s3://{name}")


def test_objects_under_a_prefix_or_glob_are_read_and_named_by_their_etag(
    bucket: Store, store: Store, make_spec: MakeSpec
) -> None:
    for number in range(4):
        bucket.put(f"text/{number}.txt", prose(number).encode())
    bucket.put("text/more/5.jsonl", b"".join(json.dumps({"text": prose(n)}).encode() + b"\n" for n in range(90, 120)))
    bucket.put("textual/6.txt", prose(6).encode())
    whole = make_spec(f"{bucket.url}/text")
    prepared = run(whole, store)
    assert sum(prepared.documents.values()) == 34
    assert prepared.lineage[0].kind == "s3"
    assert prepared.lineage[0].files == 5
    assert sum(run(make_spec(f"{bucket.url}/text/?.txt"), store).documents.values()) == 4
    assert sum(run(make_spec(f"{bucket.url}/text*/*.txt", workers=2), store).documents.values()) == 5
    bucket.put("text/1.txt", prose(77).encode())
    assert identify(whole) != prepared.dataset_id
    with pytest.raises(MissingError, match="matches no object"):
        identify(make_spec(f"{bucket.url}/nothing"))
    with pytest.raises(MissingError):
        identify(make_spec("s3://no-such-bucket-anywhere/x"))


def test_objects_that_no_key_can_name_are_left_out_or_refused_by_name(
    bucket: Store, store: Store, make_spec: MakeSpec
) -> None:
    for number in range(4):
        bucket.put(f"text/{number}.txt", prose(number).encode())
    client = boto3.client("s3")
    client.put_object(Bucket=bucket.url.removeprefix("s3://"), Key="text/.hidden/9.txt", Body=prose(9).encode())
    assert sum(run(make_spec(f"{bucket.url}/text"), store).documents.values()) == 4
    client.put_object(Bucket=bucket.url.removeprefix("s3://"), Key="text/a//3.txt", Body=prose(3).encode())
    for uri in (f"{bucket.url}/text", f"{bucket.url}/text/a//3.txt"):
        with pytest.raises(DataError, match=r"data\.sources\.0\.uri: key 'text/a//3.txt'"):
            identify(make_spec(uri))


def test_a_dataset_in_a_bucket_has_the_same_bytes(
    bucket: Store, store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    spec = make_spec(write_jsonl(tmp_path / "a.jsonl", [prose(number) for number in range(100)]), workers=2)
    prepared = run(spec, store)
    assert run(spec, bucket).dataset_id == prepared.dataset_id
    assert tree(bucket, "datasets/") == tree(store, "datasets/")
    assert not run(spec, bucket).created


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Git repository in which DVC tracks a folder and a file, with two commits."""
    folder = tmp_path_factory.mktemp("dvc") / "repository"
    (folder / "data").mkdir(parents=True)
    for number in range(20):
        (folder / "data" / f"{number:02d}.txt").write_text(prose(number))
    write_jsonl(folder / "one.jsonl", [prose(number) for number in range(100, 120)])
    _commit(folder)
    (folder / "data" / "03.txt").write_text(prose(500))
    _commit(folder)
    return folder


def _commit(folder: Path) -> None:
    commit(folder, "data", "one.jsonl")


def _head(folder: Path, revision: str = "HEAD") -> str:
    process = subprocess.run(["git", "rev-parse", revision], cwd=folder, check=True, capture_output=True, text=True)
    return process.stdout.strip()


def test_a_dvc_path_at_a_revision_is_read_from_there_and_recorded(
    repository: Path, store: Store, make_spec: MakeSpec, tmp_path: Path
) -> None:
    def at(path: str, revision: str | None) -> dict[str, str | None]:
        return {"uri": f"dvc:{path}", "repo": str(repository), "revision": revision}

    old, new = (run(make_spec(at("data", revision), workers=2), store) for revision in ("HEAD~1", "main"))
    assert old.dataset_id != new.dataset_id
    assert old.lineage[0].revision == _head(repository, "HEAD~1")
    assert new.lineage[0].revision == _head(repository)
    tracked = (repository / "data.dvc").read_text()
    new_hash, old_hash = new.lineage[0].hash, old.lineage[0].hash
    assert new_hash is not None and new_hash in tracked
    assert old_hash is not None and old_hash not in tracked
    assert new.lineage[0].repository == str(repository)
    single = run(make_spec(at("one.jsonl", "HEAD")), store)
    assert sum(single.documents.values()) == 20
    work_tree = run(make_spec(at("data", None)), store)
    assert work_tree.tokens == new.tokens
    assert work_tree.lineage[0].revision == f"{_head(repository)} (work tree)"


def test_only_a_commit_that_changes_the_data_is_another_dataset(
    repository: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    folder = shutil.copytree(repository, tmp_path / "repository", symlinks=True)
    source = {"uri": "dvc:data", "repo": str(folder), "revision": "main"}
    before = identify(make_spec(source))
    (folder / "README").write_text("more")
    _commit(folder)
    assert identify(make_spec(source)) == before
    (folder / "data" / "04.txt").write_text(prose(501))
    _commit(folder)
    assert identify(make_spec(source)) != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uri": "dvc:nowhere"}, "'nowhere' does not exist in .* at main; check the path"),
        ({"revision": "no-such-branch"}, "unknown Git revision 'no-such-branch'.*check `"),
        ({"repo": "/proc"}, "/proc at main: .*check `repo`"),
    ],
)
def test_missing_dvc_data_is_reported(
    repository: Path, make_spec: MakeSpec, change: dict[str, str], message: str
) -> None:
    source = {"uri": "dvc:data", "repo": str(repository), "revision": "main", **change}
    with pytest.raises(MissingError, match=message):
        identify(make_spec(source))


def test_a_tokenizer_that_is_brought_must_fit(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", [f"Straße {prose(number)}" for number in range(60)])
    prepared = run(make_spec(corpus), store)
    good = json.loads(store.get(layout.dataset(prepared.dataset_id, "tokenizer.json")))
    path = tmp_path / "tokenizer.json"

    def bring(tokenizer: object, **settings: str) -> Prepared:
        path.write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
        return run(make_spec(corpus, tokenizer={"kind": "file", "path": str(path), **settings}), store)

    retokenized = bring(good)
    assert retokenized.tokens == prepared.tokens
    assert retokenized.dataset_id != prepared.dataset_id
    with pytest.raises(DataError, match=r"has no token '</s>'.*it has '<\|endoftext\|>': set it to that"):
        bring(good, end_of_text="</s>")
    with pytest.raises(DataError, match=r"a\.jsonl:1: does not come back from the tokenizer: 'Stra"):
        bring({**good, "normalizer": {"type": "Lowercase"}})
    for broken in ("{}", "not json", '{"version": "1.0"}'):
        with pytest.raises(DataError, match="is no tokenizer"):
            bring(broken)
    path.unlink()
    with pytest.raises(MissingError, match="is no file"):
        run(make_spec(corpus, tokenizer={"kind": "file", "path": str(path)}), store)


def test_without_dvc_a_source_of_it_names_what_to_install(
    store: Store, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dvc", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "dvc.api", None)
    with pytest.raises(MissingError, match=r"a `dvc:` source needs DVC.*pip install 'holdfast\[dvc\]'"):
        run(make_spec({"uri": "dvc:data"}), store)
