"""Inputs and the dataset of a script: what is identified, fetched once per node, and read by step."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.code.resolve import publish_code
from holdfast.components.train.script import train_script
from holdfast.corpus import prepare
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.table import edges_of, start_of, steps_from
from holdfast.script.inputs import fetch_input
from holdfast.spec import Spec, run_id
from holdfast.spec.errors import DataError, MissingError, SpecError
from holdfast.store import Store, open_store
from tests.corpus.conftest import prose, write_jsonl
from tests.model.test_hub import COMMIT, Hub, serving
from tests.script.launched import digest_of_run, run_script

SCRIPT = """
import torch
import holdfast

session = holdfast.session(seed=3)
words = session.input("words", "words.txt").read_text().split()
weight = torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([weight], lr=1.0)
state = {"weight": torch.nn.ParameterList([weight])}
for step in range(session.restore(model=state["weight"], steps=2), 2):
    weight.grad = torch.tensor(-float(len(words)))
    optimizer.step()
    session.step(step + 1, loss=float(weight.detach()))
session.export(state["weight"])
"""


def write(folder: Path, uri: str, more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    path = folder / "spec.yaml"
    path.write_text(f"name: read\ntrain:\n  script: train.py\n  inputs: [{{name: words, uri: '{uri}'}}]\n{more}")
    return path


def place(spec: Spec) -> tuple[str, str]:
    (given,) = spec.train.inputs
    assert given.digest is not None
    return given.uri, given.digest


def identity(path: Path) -> str:
    return run_id(load_spec(path), "")


def test_the_run_id_follows_the_content_of_an_input_and_not_its_place(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a b c")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "words.txt").write_text("a b c")
    path = write(tmp_path, "words.txt")
    before = identity(path)
    assert identity(write(tmp_path, str(tmp_path / "copy" / "words.txt"))) == before
    assert identity(write(tmp_path, "copy")) == before  # the same files
    (tmp_path / "copy" / ".hidden").write_text("not read")
    assert identity(path) == before
    (tmp_path / "copy" / "words.txt").write_text("a b d")
    assert identity(path) != before


def test_a_run_without_inputs_keeps_the_id_that_it_had(tmp_path: Path) -> None:
    path = write(tmp_path, "x")
    path.write_text("name: read\ntrain: {script: train.py}\n")
    (tmp_path / "train.py").write_text("import holdfast\n")
    assert identity(path) == "ba6992c606ba433b"


def test_every_unreadable_input_is_a_problem_with_its_place_in_the_spec(tmp_path: Path) -> None:
    path = write(tmp_path, "gone.txt")
    with pytest.raises(SpecError, match=r"train.inputs.0.uri: cannot be read: .*gone.txt: does not exist") as raised:
        load_spec(path)
    assert "spec.yaml" in str(raised.value)
    (tmp_path / "gone.txt").mkdir()
    with pytest.raises(SpecError, match="has no files"):
        load_spec(path)
    path.write_text(path.read_text().replace("'}]", "'}, {name: words, uri: x}]"))
    with pytest.raises(SpecError, match="'words' is the name of two inputs"):
        load_spec(path)
    with pytest.raises(SpecError, match=r"train.inputs.0.uri: contains credentials"):
        load_spec(write(tmp_path, "s3://key:secret@bucket/x"))


def test_local_files_stay_in_place_and_are_compared_again_after_a_change(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a b c")
    uri, digest = place(load_spec(write(tmp_path, "words.txt")))
    cache = tmp_path / "cache"
    assert fetch_input("words", uri, digest, cache) == words
    words.chmod(0)  # it is not read again
    assert fetch_input("words", uri, digest, cache) == words
    words.chmod(0o644)
    os.utime(words, ns=(1, 1))  # another time, the same bytes
    assert fetch_input("words", uri, digest, cache) == words
    words.write_text("a b d")
    with pytest.raises(DataError, match=r"input words: .* has other content .* than the run id was made from"):
        fetch_input("words", uri, digest, cache)
    words.unlink()
    with pytest.raises(MissingError, match="does not exist on this machine"):
        fetch_input("words", uri, digest, cache)


@pytest.mark.parametrize("key", ["few/words.txt", "few"])
def test_objects_of_a_bucket_are_fetched_once_and_again_after_a_change(s3_url: str, tmp_path: Path, key: str) -> None:
    store = open_store(s3_url)
    store.put("few/words.txt", b"a b c")
    store.put("fewer/words.txt", b"of another prefix")
    spec = load_spec(write(tmp_path, f"{s3_url}/{key}"))
    uri, digest = place(spec)
    path = fetch_input("words", uri, digest, tmp_path / "cache")
    file = path if path.is_file() else path / "words.txt"
    assert file.read_bytes() == b"a b c"
    assert [each.name for each in path.parent.rglob("words.txt")] == ["words.txt"]
    file.chmod(0o644)
    file.write_bytes(b"x y z")
    assert fetch_input("words", uri, digest, tmp_path / "cache") == path
    assert file.read_bytes() == b"a b c"
    store.put("few/words.txt", b"a b d")
    assert fetch_input("words", uri, digest, tmp_path / "cache") == path  # a run that began before is resumed
    with pytest.raises(DataError, match="has other content"):
        fetch_input("words", uri, digest, tmp_path / "other")


@pytest.mark.parametrize("key", ["few/words.txt", "few"])
def test_an_object_that_changes_while_it_is_fetched_is_refused(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    store = open_store(s3_url)
    store.put("few/words.txt", b"a b c")
    uri, digest = place(load_spec(write(tmp_path, f"{s3_url}/{key}")))
    download = type(store).download

    def replaced(self: Store, name: str, path: Path) -> None:
        store.put("few/words.txt", b"x y z")
        download(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "download", replaced)
        with pytest.raises(DataError, match="changed while it was read"):
            fetch_input("words", uri, digest, tmp_path / "cache")
    store.put("few/words.txt", b"a b c")
    path = fetch_input("words", uri, digest, tmp_path / "cache")
    assert (path if path.is_file() else path / "words.txt").read_bytes() == b"a b c"


@pytest.fixture(params=["models", "datasets"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "words.txt").write_text("a b c")
    (folder / "README.md").write_text("About it.")
    with serving(folder, monkeypatch, request.param) as server:
        yield server


def test_a_repository_is_pinned_to_a_commit_when_the_run_is_submitted(hub: Hub, tmp_path: Path) -> None:
    owner = "datasets/tiny" if "datasets" in hub.api else "tiny"
    spec = load_spec(write(tmp_path, f"hf://{owner}/llama/deep"))
    uri, digest = place(spec)
    assert uri == f"hf://{owner}/llama@{COMMIT}/deep"
    assert not any("resolve" in request for request in hub.requests)
    path = fetch_input("words", uri, digest, tmp_path / "cache")
    assert [(file.name, file.read_text()) for file in path.iterdir()] == [("words.txt", "a b c")]
    (path / "words.txt").write_text("x y z")  # damage in the cache
    assert (fetch_input("words", uri, digest, tmp_path / "cache") / "words.txt").read_text() == "a b c"
    uri, digest = place(load_spec(write(tmp_path, f"hf://{owner}/llama/deep/words.txt")))
    assert fetch_input("words", uri, digest, tmp_path / "cache").read_text() == "a b c"
    asked = len(hub.requests)
    assert fetch_input("words", uri, digest, tmp_path / "cache").read_text() == "a b c"
    assert len(hub.requests) == asked


@pytest.mark.slow
def test_a_script_reads_its_input_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a b c")
    spec = load_spec(write(tmp_path, "words.txt"))
    store = open_store(f"file://{tmp_path / 'store'}")
    publish_code(spec, store)
    result = train_script(spec, "", store)
    assert (result.step, result.loss) == (2, 6.0)


def test_a_session_names_the_inputs_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = holdfast.Session()
    assert session.input("words", "words.txt") == Path("words.txt")
    with pytest.raises(holdfast.StateError, match=r"session.input\('words'\): this is no managed run"):
        session.input("words")
    with pytest.raises(holdfast.StateError, match=r"session.dataset: this is no managed run"):
        session.dataset(4, 8)
    seen: list[Path] = []

    def script() -> None:
        managed = holdfast.session(seed=1)
        seen.append(managed.input("words", "unused"))
        with pytest.raises(holdfast.StateError, match=r"no such input \(words\); add it to train.inputs"):
            managed.input("world")
        with pytest.raises(holdfast.StateError, match="the run has no dataset"):
            managed.dataset(4, 8)

    run_script(f"file://{tmp_path / 'store'}", "0123456789abcdef", script, inputs={"words": tmp_path})
    assert seen == [tmp_path]


DATA = """data:
  sources: [{uri: text.jsonl}]
  tokenizer: {vocabulary: 300}
  validation_fraction: 0.1
  workers: 1
"""


@pytest.fixture
def with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "text.jsonl", [prose(number) for number in range(40)])
    (tmp_path / "train.py").write_text("import holdfast\n")
    path = tmp_path / "spec.yaml"
    path.write_text(f"name: read\ntrain: {{script: train.py, determinism: exact}}\n{DATA}")
    return load_spec(path)


def test_with_data_the_dag_of_a_script_begins_with_preprocess(with_data: Spec) -> None:
    assert list(steps_from(start_of(with_data), edges_of(with_data))) == ["preprocess", "train"]
    scored = with_data.with_overrides({"evaluation.command": ["python", "score.py"]})
    assert list(steps_from(start_of(scored), edges_of(scored))) == ["preprocess", "train", "evaluate", "register"]
    assert len({run_id(with_data, dataset) for dataset in ("", "0" * 16, "1" * 16)}) == 3
    with pytest.raises(SpecError, match=r"data.kind: is not read by train.script"):
        with_data.with_overrides({"data.kind": "prompts"})


def test_a_resumed_script_reads_the_rows_of_an_undisturbed_one(with_data: Spec, tmp_path: Path) -> None:
    store: Store = open_store(f"file://{tmp_path / 'store'}")
    dataset_id = prepare(with_data, store).dataset_id

    def script(rows: list[torch.Tensor], steps: int, ahead: bool) -> None:
        session = holdfast.session(seed=5)
        data = session.dataset(global_batch=6, context=16)
        assert data.dataset_id == dataset_id
        model = nn.Embedding(data.vocabulary, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        start = session.restore(model=model, optimizer=optimizer, steps=steps)
        read = data.batches(start, steps) if ahead else (data.batch(step) for step in range(start, steps))
        for step, tokens in enumerate(read, start):
            rows.append(tokens)
            loss = model(tokens).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(step + 1, loss=loss)

    calm: list[torch.Tensor] = []
    broken: list[torch.Tensor] = []
    run_script(store.url, "0" * 16, script, calm, 6, False, dataset_id=dataset_id)
    run_script(store.url, "1" * 16, script, broken, 3, True, dataset_id=dataset_id)
    run_script(store.url, "1" * 16, script, broken, 6, True, dataset_id=dataset_id)
    assert [tuple(rows.shape) for rows in calm] == [(6, 17)] * 6
    assert len({rows.numpy().tobytes() for rows in calm}) == 6
    assert all(torch.equal(one, other) for one, other in zip(calm, broken, strict=True))
    assert digest_of_run(store.url, "0" * 16) == digest_of_run(store.url, "1" * 16)


def test_ranks_share_the_rows_of_a_step(with_data: Spec, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    dataset_id = prepare(with_data, store).dataset_id

    def script() -> None:
        session = holdfast.session(seed=5)
        whole = session.dataset(6, 16).batch(4)
        parts = [session.dataset(6, 16, rank=rank, ranks=3).batch(4) for rank in range(3)]
        assert torch.equal(torch.cat(parts), whole)
        assert sum(len(rows) for rows in session.dataset(6, 16).validation(100)) == 6
        with pytest.raises(holdfast.StateError, match="4 ranks do not divide global_batch 6; use a multiple of 4"):
            session.dataset(6, 16, rank=0, ranks=4)
        with pytest.raises(holdfast.StateError, match="rank 2 is not one of 2"):
            session.dataset(6, 16, rank=2, ranks=2)
        session.restore(model=nn.Linear(1, 1), steps=1)
        session.step(1, loss=0.0)

    run_script(store.url, "2" * 16, script, dataset_id=dataset_id)
