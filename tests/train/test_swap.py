"""DeepSpeed's optimizer state and weights in files on a disk of the node, through its own asynchronous I/O."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import Attempt, Checkpointer, Retention, digest_of, read_manifest
from holdfast.collectives import Gang
from holdfast.engines.deepspeed import swap
from holdfast.engines.deepspeed.swap import SwapFiles
from holdfast.engines.weights import SeededState
from holdfast.runtime.exits import code_of
from holdfast.spec.errors import ExitCode, HoldfastError, MissingError, SpecError, UnhealthyNodeError
from holdfast.store import open_store
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, identity_of, join, launch, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, new_store, tiny_assignment, tiny_spec

pytestmark = pytest.mark.slow  # the fixture trains

# DeepSpeed swaps groups and weights of 1 MiB and more.
LARGE = ("model.hidden=256", "model.layers=2", "training.global_batch=4", "training.micro_batch=2")
# In bf16, half of such a matrix is that large, and not a multiple of a block.
WIDE = ("model.layers=1", "model.ffn=4101")


def overrides(folder: Path | None, processes: int, strategy: str = "zero3", offload: str = "optimizer") -> list[str]:
    fields = [*LARGE, f"parallel.strategy={strategy}", f"parallel.processes={processes}", "training.steps=6"]
    fields += [f"parallel.offload={offload}"] if strategy == "zero3" else []
    return fields + ([f"parallel.offload_path={folder}"] if folder is not None else [])


@pytest.fixture(scope="module")
def compiled() -> None:
    """DeepSpeed's asynchronous I/O, compiled once for this machine."""
    if shutil.which("g++") is None or not Path("/usr/include/libaio.h").exists():
        pytest.skip("g++ or libaio-dev is not installed, so DeepSpeed's operators cannot be compiled")
    assert in_ranks(1, _compile) == [""]


def _compile(rank: int, size: int, folder: Path | None = None) -> str:
    """With a `folder`, nothing is compiled yet, and no compiler exists."""
    from holdfast.engines.deepspeed.aio import load_async_io

    if folder is not None:
        os.environ["TORCH_EXTENSIONS_DIR"] = os.environ["PATH"] = str(folder)
    try:
        load_async_io(print)
    except MissingError as error:
        return str(error)
    return ""


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.usefixtures("compiled")
def test_runs_with_swap_files_that_were_stopped_or_killed_have_the_bits_of_those_without_them(tmp_path: Path) -> None:
    store, swap = new_store(tmp_path / "store"), tmp_path / "swap"
    wide = ("model.ffn=1536", "training.activation_checkpointing=full")
    away = {offload: (*overrides(swap, 1, offload=offload), *wide) for offload in ("optimizer", "parameters_on_disk")}
    without_swap = {
        offload: (*overrides(None, 1, offload=in_memory), *wide)
        for offload, in_memory in (("optimizer", "optimizer"), ("parameters_on_disk", "parameters"))
    }
    weights, optimizer = away["parameters_on_disk"], away["optimizer"]
    runs: Runs = []
    for offload, fields in away.items():  # one run each, apart from the salt
        runs += [(without_swap[offload], f"{offload} here", None), (fields, f"{offload} away", None)]
    assert train_in_ranks(1, store.url, tmp_path / "first", [*runs, (weights, "stopped", 2)]) == [""] * 4 + [
        "PreemptedError"
    ]
    assert left(swap) == []
    for fields, salt, files in ((optimizer, "killed optimizer", 0), (weights, "killed", 6)):
        assert train_in_ranks(1, store.url, tmp_path / salt, [(fields, salt, 4)], number=9) is None
        assert len(left(swap)) == 1
        assert len([*swap.rglob("*_param.tensor.swp")]) == files  # three wide matrices in each layer
    runs = [(weights, "stopped", None), (without_swap["parameters_on_disk"], "killed", None), (weights, "killed", None)]
    assert train_in_ranks(1, store.url, tmp_path / "second", runs) == ["", "PlanChangedError", ""]
    assert left(swap) == []
    undisturbed = trained(store, tiny_spec(*weights), "parameters_on_disk away")
    assert trained(store, tiny_spec(*weights), "stopped") == undisturbed
    assert trained(store, tiny_spec(*weights), "killed") == undisturbed
    for offload, fields in away.items():
        digests = {trained(store, tiny_spec(*fields), f"{offload} {place}")["digest"] for place in ("here", "away")}
        assert len(digests) == 1, offload


@pytest.mark.usefixtures("compiled")
def test_a_run_with_weights_on_a_disk_has_the_bits_of_one_that_offloads_nothing(tmp_path: Path) -> None:
    store, swap = new_store(tmp_path / "store"), tmp_path / "swap"
    common = (*WIDE, "training.precision=bf16", "training.clip_norm=null")
    on_device = (*overrides(None, 2, offload="none"), *common)
    on_disk = (*overrides(swap, 2, offload="parameters_on_disk"), *common)
    runs: Runs = [(on_device, "here", None), (on_disk, "away", None)]
    assert train_in_ranks(2, store.url, tmp_path / "ranks", runs) == ["", ""]
    assert left(swap) == []
    digests = [
        trained(store, tiny_spec(*fields), name)["digest"] for fields, name in ((on_device, "here"), (on_disk, "away"))
    ]
    assert digests[0] == digests[1]


@pytest.mark.usefixtures("compiled")
def test_weights_that_a_disk_did_not_keep_end_the_step(tmp_path: Path) -> None:
    assert in_ranks(1, _lose_weights, tmp_path) == [3]


def _lose_weights(rank: int, size: int, folder: Path) -> int:
    """The number of weights that are only in files after an engine's layers have used them."""
    from holdfast.engines.interface import build_engine

    join(folder, rank, size, always=True)
    engine: Any = build_engine(
        tiny_assignment(*overrides(folder, size, offload="parameters_on_disk"), *WIDE), VOCABULARY, 0
    )
    engine.restored(0)
    rows = torch.arange(4 * 17).view(4, 17) % VOCABULARY
    weights = [parameter for parameter in engine._parameters.values() if parameter.ds_tensor.final_location == "nvme"]
    sizes: list[tuple[int, int]] = []
    engine._engine.module.model.norm.register_forward_pre_hook(
        lambda *_: sizes.extend((parameter.ds_tensor.numel(), parameter.numel()) for parameter in weights)
    )
    engine.step(rows, 0.01)
    assert sizes == [(1, 0)] * len(weights) * 2  # their memory is free after the layers of each micro-batch
    with Path(weights[-1].nvme_swapper.get_path(weights[-1])).open("r+b") as file:
        file.write(b"\1\2\3\4")
        os.fsync(file)
    with pytest.raises(UnhealthyNodeError, match=r"_param\.tensor\.swp: .* other bytes"):
        engine.step(rows, 0.01)
    engine.close()
    return len(weights)


@pytest.mark.usefixtures("compiled")
def test_a_state_in_several_swap_files_transfers_between_engines_bit_for_bit(tmp_path: Path) -> None:
    for digests, losses, swapped in in_ranks(2, _hand_on, f"file://{tmp_path / 'store'}", tmp_path):
        assert len(digests) == 6
        assert len(set(digests)) == 1
        assert len(losses) == 3 and len(set(losses)) == 1
        assert swapped >= 2  # groups


def _hand_on(rank: int, size: int, url: str, folder: Path) -> tuple[list[str], list[float], int]:
    """The digests of a state that several engines pass on, the losses of DeepSpeed with swap files, and the number of
    groups in files.
    """
    from holdfast.engines.deepspeed import config
    from holdfast.engines.interface import build_engine
    from holdfast.rank.randomness import make_deterministic

    config.SUB_GROUP = 300_000
    join(folder, rank, size, always=True)
    make_deterministic("exact", 1)
    store, swap, swapped_files, losses = open_store(url), folder / "swap", 0, []
    layouts: list[tuple[str, str, Path | None]] = [
        ("fsdp", "none", None), ("zero3", "optimizer", swap), ("ddp", "none", None), ("zero3", "parameters", swap),
        ("zero3", "parameters_on_disk", swap), ("zero2", "none", None),
    ]  # fmt: skip
    for number, (strategy, offload, path) in enumerate(layouts, start=1):
        assignment = tiny_assignment(*overrides(path, size, strategy, offload), "model.ffn=2048")
        engine: Any = build_engine(assignment, VOCABULARY, 0)
        describe = {"dataset_id": DATASET_ID, "layout": engine.layout, "random": {}}
        checkpointer = Checkpointer(store, Attempt("handed-on", number), Retention(9), describe=describe)
        engine.restored(checkpointer.restore(engine.boxes(), SeededState(assignment.model, 3).fill))
        checkpointer.save(number, engine.saved(), {"optimizer.step": 0})
        checkpointer.wait()
        before, digests_inside = digest_of(engine.saved()), []
        rows = torch.arange(2 * 17).view(2, 17) % VOCABULARY
        step_losses = [
            float(engine.step(rows, rate, lambda: digests_inside.append(digest_of(engine.saved()))).loss)  # noqa: B023
            for rate in (0.0, 0.01)
        ]
        assert digests_inside[0] == before and digest_of(engine.saved()) != digests_inside[1]
        if path is not None:
            losses.append(step_losses[0])
            swapped_files = sum(
                map(engine._optimizer._swappable_optimizer_subgroup, range(len(engine._optimizer.fp16_groups)))
            )
        engine.close()
    Gang().barrier()  # only rank 0 has waited for the last commit
    digests = [read_manifest(store, "handed-on", number).state_digest for number in range(1, len(layouts) + 1)]
    return digests, losses, swapped_files


class Disk:
    """DeepSpeed's I/O handle without delay. A full disk truncates each file at a given size."""

    def __init__(self, room: int | None = None) -> None:
        self.room, self.done = room, 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, _: int) -> int:
        Path(path).write_bytes(buffer.numpy().tobytes()[: self.room])
        self.done += 1
        return 0

    def async_pread(self, buffer: torch.Tensor, path: str, _: int) -> int:
        buffer.copy_(torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.float32))
        self.done += 1
        return 0

    def wait(self) -> int:
        finished, self.done = self.done, 0
        return finished


def test_bytes_that_a_swap_disk_corrupts_are_detected(tmp_path: Path) -> None:
    swap, numbers = SwapFiles(str(tmp_path), "run"), torch.arange(512, dtype=torch.float32)
    path, handle = str(swap.folder / "a"), swap.handle(Disk())
    handle.async_pwrite(numbers, path, 0)
    assert handle.wait() == 1
    swap.mapped(path)[3] = 7.0  # a state is loaded
    swap.filled()
    handle.async_pread(read := torch.zeros(512), path, 0)
    assert (handle.wait(), float(read[3])) == (1, 7.0)
    swap.require_as_written()
    with Path(path).open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(UnhealthyNodeError, match="other bytes"):
        swap.require_as_written()
    handle.async_pread(read, path, 0)
    with pytest.raises(UnhealthyNodeError, match="other bytes"):
        handle.wait()
    full = swap.handle(Disk(room=1024))
    full.async_pwrite(numbers, path, 0)
    with pytest.raises(OSError, match="No space left"):
        full.wait()


def test_swap_files_of_ranks_that_live_are_left_alone(tmp_path: Path) -> None:
    living = (
        "import sys; from holdfast.engines.deepspeed.swap import SwapFiles\n"
        "swap = SwapFiles(sys.argv[1], 'other'); print(swap.folder.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", living, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        SwapFiles(str(tmp_path), "run").close()
        assert left(tmp_path) == [name]
        other.kill()
    SwapFiles(str(tmp_path), "run").close()
    assert left(tmp_path) == []


def test_a_folder_that_cannot_hold_swap_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="use a folder on a local disk"):
        SwapFiles(str(tmp_path / "file" / "in it"), "run")


@pytest.mark.parametrize(
    ("number", "mounted", "code"),
    [
        (errno.ENOSPC, True, ExitCode.NO_SPACE), (errno.EDQUOT, True, ExitCode.NO_SPACE),
        (errno.EIO, True, ExitCode.UNHEALTHY_NODE), (errno.EROFS, True, ExitCode.UNHEALTHY_NODE),
        (errno.EROFS, False, ExitCode.BAD_SPEC), (errno.EINVAL, True, ExitCode.BAD_SPEC),
        (errno.EACCES, True, ExitCode.BAD_SPEC),
    ],
)  # fmt: skip
def test_a_full_or_broken_swap_disk_is_not_a_spec_error(
    number: int, mounted: bool, code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def answer(path: Any, flags: int, *mode: int, **of: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number), path)
        return real_open(path, flags, *mode, **of)

    monkeypatch.setattr(os, "open", answer)
    monkeypatch.setattr(swap, "_is_mounted", lambda _: mounted)
    with pytest.raises((OSError, HoldfastError)) as error:
        SwapFiles(str(tmp_path), "run")
    assert code_of(error.value) == code
    assert left(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of others")
def test_swap_files_of_other_users_are_left_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a folder that every user can reach
        scratch = Path(folder)
        scratch.chmod(0o1777)
        for user, folders in ((1001, 1), (1002, 2), (1001, 2)):
            in_ranks(1, _as_user, user, scratch)
            assert len(left(scratch)) == folders


def _as_user(_rank: int, _size: int, user: int, folder: Path) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    SwapFiles(str(folder), "run")  # and dies


class Engine:
    """A built engine that records whether it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def frozen(self) -> list[Any]:
        raise RuntimeError("what comes next fails")

    def close(self) -> None:
        self.closed += 1


def test_a_rank_always_closes_its_engine(tmp_path: Path) -> None:
    assert in_ranks(1, _end_early, new_store(tmp_path / "store").url, tmp_path) == [(1, 1)]


def _end_early(rank: int, size: int, url: str, folder: Path) -> tuple[int, int]:
    """The number of closed engines of a training and of a replay that end before their first step."""
    from holdfast.audit import replay_rank
    from holdfast.rank import setup as rank_setup
    from holdfast.rank import worker
    from holdfast.rank.preemption import PreemptionSignal
    from holdfast.script.replay import Replay

    join(folder, rank, size, always=False)
    store, spec = open_store(url), tiny_spec()
    identity, number, engines = identity_of(spec), launch(store, spec), (Engine(), Engine())
    rank_setup.build_engine = lambda *_: engines[0]  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="comes next"):
        worker.work(store, identity, number, PreemptionSignal())
    replay_rank.build_engine = lambda *_: engines[1]  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="comes next"):
        replay_rank.replay(store, identity, number, Replay(0, 1, folder / "results"))
    return engines[0].closed, engines[1].closed


def test_an_engine_that_cannot_be_built_leaves_no_swap_files(tmp_path: Path) -> None:
    assert in_ranks(1, _fail_to_build, tmp_path / "swap") == [[]]


def _fail_to_build(_rank: int, _size: int, swap: Path) -> list[str]:
    from holdfast.engines.deepspeed import engine

    def fail(_: object) -> None:
        assert len(left(swap)) == 1
        raise RuntimeError("it does not compile")

    engine.load_async_io = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="does not compile"):
        engine.DeepSpeedEngine(tiny_assignment(*overrides(swap, 1)), VOCABULARY, 0)
    return left(swap)


@pytest.mark.usefixtures("compiled")
def test_a_failed_compilation_names_the_missing_package(tmp_path: Path) -> None:
    (message,) = in_ranks(1, _compile, tmp_path)
    assert "libaio-dev" in message
