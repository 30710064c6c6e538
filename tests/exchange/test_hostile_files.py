"""Untrusted checkpoints: the process stays unchanged, sizes are compared first, and only our errors are raised."""

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.exchange import DistributedCheckpoint, UniversalCheckpoint
from holdfast.exchange.pickle_records import Table, read_pickle
from holdfast.exchange.torch_file import read_tensors
from holdfast.spec.errors import DataError, HoldfastError

NAME = "model.norm.weight"


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "dcp"
    tensors = {NAME: torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(1.5)}
    dcp.save({"app": tensors, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_are_read_as_torch_wrote_them(tmp_path: Path) -> None:
    """Parameters, views, transposed tensors, numbers, small and empty dtypes, and more rows than one read takes."""
    tensors = {
        "parameter": torch.nn.Parameter(torch.randn(5, 3)),
        "view": torch.arange(24.0).view(4, 6)[1:, 2:],
        "transposed": torch.arange(24.0).view(4, 6).T,
        "number": torch.tensor(2.5),
        "half": torch.randn(7).half(),
        "brain": torch.randn(7, 2).bfloat16(),
        "double": torch.randn(3, 3, 3).double(),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    torch.save({**tensors, "step": 3, "ids": torch.arange(3)}, tmp_path / "x.pt")
    loaded = read_tensors(tmp_path / "x.pt")
    assert isinstance(loaded, dict)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].shape, loaded[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        parts = [part for _, part in loaded[name].rows(40)]
        if tensor.numel():
            assert torch.equal((torch.cat(parts) if tensor.dim() else parts[0]).double(), tensor.detach().double())


def test_state_set_on_a_class_changes_nothing_in_the_process(saved: Path, tmp_path: Path) -> None:
    """BUILD on pathlib's class would change every path of the process."""
    folder = tmp_path / "dcp"
    folder.mkdir()
    body = (saved / ".metadata").read_bytes()
    for attribute in ("name", "_str"):
        poison = b"cpathlib\nPosixPath\nN}" + short(attribute) + short("../secret.pt") + b"s\x86b0"
        (folder / ".metadata").write_bytes(body[:11] + poison + body[11:])
        with pytest.raises(DataError, match="sets the state of what is no object"):
            DistributedCheckpoint(folder)
        assert (PurePosixPath("a/b").name, str(Path("a/b"))) == ("b", "a/b")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02})" + b"2\x86" * 40 + b"Ns.",  # a tuple of itself, nested to 2^40 items, as a dictionary key
        b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",  # a million nested tuples
        b"\x80\x04]\x94" + b"h\x00a" * 1000 + b".",  # a list that contains itself
    ],
    ids=["doubled", "deep", "circle"],
)
def test_a_deeply_nested_pickle_is_read_without_extra_cost(data: bytes) -> None:
    assert isinstance(read_pickle(data, "x", ()), Table | list)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"(" * 5000 + b".", "deep"),
        (b"N" * 1_100_000 + b".", "wait on its stack"),
        (b"X\xff\xff\xff\xffx.", "no whole pickle"),
        (b"\x8d" + b"\xff" * 8 + b".", "no whole pickle"),
        (b"N", "no whole pickle"),
        (b"", "no whole pickle"),
        (b".", "no whole pickle"),
        (b"h\x07.", "no whole pickle"),
        (b"cos\nsystem\n.", "names 'os.system'"),
        (b"cos\n" + b"x" * 5000, "no whole pickle"),
        (short("os") + short("system") + b"\x93.", "names 'os.system'"),
        (b"I1\n.", "opcode 0x49"),
        (b"]N\x85R.", "object of what is no name"),
        (b"NNb.", "sets the state"),
        (b"NNa.", "no list"),
        (b"N(NNu.", "no dictionary"),
        (b"}(Nu.", "no dictionary"),
        (b"NN\x93.", "no text"),
    ],
)
def test_a_pickle_out_of_bounds_or_in_pieces_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickle(data, "x", ())


def rewritten(data: bytes, change: Callable[[zipfile.ZipInfo, bytes], bytes | None]) -> bytes:
    """An archive of torch.save with changed records."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(target, "w") as archive:
        for info in source.infolist():
            if (content := change(info, source.read(info))) is not None:
                archive.writestr(info, content)
    return target.getvalue()


def deflate(info: zipfile.ZipInfo, content: bytes) -> bytes:
    if info.filename.endswith("data/0"):
        info.compress_type = zipfile.ZIP_DEFLATED
    return content


def archive_of(*tensors: torch.Tensor) -> bytes:
    target = io.BytesIO()
    torch.save({str(number): tensor for number, tensor in enumerate(tensors)}, target)
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rewritten(archive_of(torch.zeros(999)), deflate), "compressed or encrypted"),
        (rewritten(archive_of(torch.zeros(9)), lambda info, c: c[:8] if "data/" in info.filename else c), "8 bytes"),
        (rewritten(archive_of(torch.zeros(9)), lambda i, c: None if "data/0" in i.filename else c), "no record"),
        (rewritten(archive_of(torch.zeros(9)), lambda i, c: b"big" if "order" in i.filename else c), "byte order"),
        (archive_of(torch.zeros(1).expand(2**40)), "lie in the same place"),
        (archive_of(torch.zeros(9).as_strided((5, 5), (1, 1))), "lie in the same place"),
        (archive_of(torch.zeros(4))[:-30], "zip archive"),
        (b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0), "zip archive"),
        (b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 9, 9, 2**31, 0, 0), "no checkpoint needs"),
        (pickle.dumps(torch.zeros(4).numpy().tolist()) * 9, "zip archive"),
    ],
    ids=["deflated", "short", "absent", "big-endian", "expanded", "overlapping", "cut", "zip64", "directory", "pickle"],
)
def test_an_archive_is_refused_before_anything_is_made_of_it(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_tensors(tmp_path / "x.pt")


def test_two_records_in_one_place_are_refused(tmp_path: Path) -> None:
    """One block of bytes could otherwise be every tensor of a model."""
    data = bytearray(archive_of(torch.zeros(9), torch.zeros(9)))
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        places = {info.filename: info.header_offset for info in archive.infolist()}
    entry = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02"))
    while data[entry + 46 : entry + 46 + 14] != b"archive/data/1":
        entry = data.index(b"PK\x01\x02", entry + 4)
    data[entry + 42 : entry + 46] = struct.pack("<I", places["archive/data/0"])
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(DataError, match="overlap"):
        read_tensors(tmp_path / "x.pt")


def changed_metadata(saved: Path, folder: Path, change: Callable[[dcp.metadata.Metadata], None]) -> Path:
    folder.mkdir()
    for file in saved.glob("*.distcp"):
        os.link(file, folder / file.name)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_a_file_path_outside_of_the_checkpoint_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.pt"
    torch.save(torch.zeros(3, 4), secret)
    for number, place in enumerate(("../secret.pt", str(secret), "..", "", "a\\b", "a\0b", "linked")):

        def lead_out(found: dcp.metadata.Metadata, place: str = place) -> None:
            for record in found.storage_data.values():
                record.relative_path = place

        folder = changed_metadata(saved, tmp_path / f"dcp{number}", lead_out)
        (folder / "linked").symlink_to(secret)
        with pytest.raises(DataError, match="outside of the folder"):
            list(DistributedCheckpoint(folder).boxes(NAME))
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_bytes(b"..\xff")
    for name in (b"..", b"../x", b"", b"\xff/\xff", b"a\0b"):
        (tmp_path / "universal" / "latest_universal").write_bytes(name)
        with pytest.raises(HoldfastError, match="outside of the folder"):
            UniversalCheckpoint(tmp_path / "universal")


def test_parts_of_a_tensor_lie_in_it_and_are_no_more_than_it(saved: Path, tmp_path: Path) -> None:
    """A million parts at one place would take forever to read."""

    def tensor_of(found: dcp.metadata.Metadata) -> dcp.metadata.TensorStorageMetadata:
        tensor = found.state_dict_metadata[f"app.{NAME}"]
        assert isinstance(tensor, dcp.metadata.TensorStorageMetadata)
        return tensor

    def repeat(found: dcp.metadata.Metadata) -> None:
        tensor_of(found).chunks *= 2

    def outside(found: dcp.metadata.Metadata) -> None:
        tensor_of(found).chunks[0].offsets = torch.Size([1, 0])

    def negative(found: dcp.metadata.Metadata) -> None:
        tensor_of(found).size = (-3, -4)  # type: ignore[assignment]

    def long(found: dcp.metadata.Metadata) -> None:
        for record in found.storage_data.values():
            record.length = 2**62

    for number, (change, message) in enumerate(
        [(repeat, "more elements"), (outside, "not inside"), (negative, "no size"), (long, "should lie at")]
    ):
        folder = changed_metadata(saved, tmp_path / f"dcp{number}", change)
        with pytest.raises(DataError, match=message):
            list(DistributedCheckpoint(folder).boxes(NAME))


def test_a_mutated_checkpoint_raises_only_holdfast_errors(saved: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    tokens = [
        b"2",
        b"\x85",
        b"(",
        b"b",
        b"R",
        b"\x81",
        b"e",
        b"u",
        b"0",
        b"\xff" * 8,
        b"PK\x05\x06",
        b"\x93",
        b"N",
        b"}",
    ]

    def mutated(data: bytes) -> bytes:
        mutation = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(mutation))
            match rng.randrange(4):
                case 0:
                    mutation[at] = rng.randrange(256)
                case 1:
                    del mutation[at : at + rng.choice([1, 4, 60])]
                case 2:
                    mutation[at:at] = rng.choice(tokens) * rng.choice([1, 1, 9])
                case _:
                    mutation[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1]))
        return bytes(mutation) or b"."

    (part,) = saved.glob("*.distcp")
    metadata, parts = (saved / ".metadata").read_bytes(), part.read_bytes()
    refusals = 0
    for number in range(240):
        target = number % 3
        (tmp_path / ".metadata").write_bytes(mutated(metadata) if target != 1 else metadata)
        (tmp_path / part.name).write_bytes(mutated(parts) if target != 0 else parts)
        try:
            source = DistributedCheckpoint(tmp_path)
            for name in (NAME, "b", "n"):
                if source.shape(name) is not None:
                    list(source.boxes(name))
        except HoldfastError:
            refusals += 1
    assert 50 < refusals < 240
