"""The Hub: a repository is identified without a download, and fetched as one commit, from a real HTTP server."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils.sha import git_hash

from holdfast.model.hub import Place, hub_file, parse_place, require_weights, weights_digest
from holdfast.model.hugging_face import open_weights
from holdfast.spec.errors import DataError, MissingError, StoreUnreachableError
from tests.http_server import QuietHandler, running
from tests.model.tiny_model import decoder, export, shape

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """One repository as the Hub's API returns it: the model tiny/llama, or the dataset tiny/llama."""

    def __init__(self, folder: Path, kind: str = "models") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.commit = folder, COMMIT
        self.requests: list[str] = []
        self.api = f"/api/{kind}/tiny/llama"
        self.files = f"{'/datasets' if kind == 'datasets' else ''}/tiny/llama/resolve/"

    def listed(self) -> list[tuple[str, Path]]:
        """Names and paths of the files, in all folders."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [(path.relative_to(self.folder).as_posix(), path) for path in paths]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(QuietHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith(f"{self.server.api}/tree/"):
            files = []
            for name, file in self.server.listed():
                digest, size = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
                files.append({"type": "file", "path": name, "size": size, "oid": digest[:40]})
            self._send(200, files)
        elif path.startswith(self.server.api):
            files = []
            for name, file in self.server.listed():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                size = file.stat().st_size
                lfs = {"lfs": {"size": size, "sha256": digest, "pointerSize": 1}} if "safetensors" in name else {}
                files.append({"rfilename": name, "size": size, "blobId": git_hash(file.read_bytes()), **lfs})
            answer = {"id": "tiny/llama", "sha": self.server.commit, "siblings": files}
            self._send(200, answer)
        elif path.startswith(self.server.files):
            file = self.server.folder / path.removeprefix(self.server.files).partition("/")[2]
            if file.is_file():
                data = file.read_bytes()
                self._send(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')
            else:
                self._send(404, b"", X_Error_Code="EntryNotFound")
        else:
            self._send(404, b"", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: int, data: object, **headers: str) -> None:
        self.answer(status, data, X_Repo_Commit=self.server.commit, **headers)


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "models") -> Iterator[Hub]:
    """A Hub with the files of a folder, which huggingface_hub then uses. Its cache is next to the folder."""
    server = Hub(folder, kind)
    with running(server):
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setenv("HOLDFAST_HOME", str(folder.parent / "home"))
        yield server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    export(tmp_path / "model", decoder(shape()))
    with serving(tmp_path / "model", monkeypatch) as server:
        yield server


def test_weights_in_a_folder_of_a_repository_are_those_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    inside, digest = hub.folder / "epochs" / "3", weights_digest("hf://tiny/llama")
    inside.mkdir(parents=True)
    for path in hub.folder.glob("*.*"):
        (inside / path.name).write_bytes(path.read_bytes())
    assert weights_digest("hf://tiny/llama/epochs/3") == digest
    weight_file = inside / "model.safetensors"
    weight_file.write_bytes(weight_file.read_bytes()[:-4] + b"\0\0\0\0")
    assert weights_digest("hf://tiny/llama") == digest
    assert weights_digest("hf://tiny/llama@main/epochs/3/") != digest
    assert open_weights("hf://tiny/llama/epochs/3", tmp_path / "cache").vocabulary == 300
    fetched = [request for request in hub.requests if "resolve" in request]
    assert fetched
    assert all("/epochs/3/" in request for request in fetched)
    with pytest.raises(MissingError, match=r"hf://tiny/llama/epochs/4 has no \.safetensors"):
        weights_digest("hf://tiny/llama/epochs/4")


def test_weights_of_the_hub_are_identified_without_fetching_them_and_then_read(hub: Hub, tmp_path: Path) -> None:
    digest = weights_digest("hf://tiny/llama")
    assert not any("resolve" in request for request in hub.requests)
    weights = open_weights("hf://tiny/llama", tmp_path / "cache")
    assert weights.vocabulary == 300
    assert not any(request.endswith("chat_template.jinja") for request in hub.requests)
    require_weights("hf://tiny/llama", digest)
    path = hub.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    assert weights_digest("hf://tiny/llama") != digest
    with pytest.raises(DataError, match="holds other weights"):
        require_weights("hf://tiny/llama", digest)


def test_a_hub_file_is_fetched_or_reported_missing(hub: Hub) -> None:
    file = hub_file("hf://tiny/llama/tokenizer.json")
    assert file is not None
    assert file.read_bytes() == (hub.folder / "tokenizer.json").read_bytes()
    assert hub_file("hf://tiny/llama/chat_template.jinja") is None
    with pytest.raises(MissingError, match="no such repository or revision"):
        weights_digest("hf://missing/nothing")


def test_a_hub_that_does_not_answer_is_a_place_that_cannot_be_reached(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match="hf://tiny/llama"):
        weights_digest("hf://tiny/llama")


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("hf://a/b", Place("a/b", None, "")),
        ("hf://a/b@main", Place("a/b", "main", "")),
        ("hf://a.c/b-1@v1.0/sub/t.json", Place("a.c/b-1", "v1.0", "sub/t.json")),
        ("hf://a/b/t.json", Place("a/b", None, "t.json")),
        ("hf://a/b@refs/convert/parquet/en", Place("a/b", "refs/convert/parquet", "en")),
    ],
)
def test_an_address_names_a_repository_a_revision_and_a_file(location: str, place: Place) -> None:
    assert parse_place(location) == place


@pytest.mark.parametrize("location", ["hf://a", "hf://a/b@", "hf://a/b/../c", "hf:a/b"])
def test_an_invalid_hub_address_is_refused(location: str) -> None:
    with pytest.raises(DataError, match="is not hf://owner/name"):
        parse_place(location)
