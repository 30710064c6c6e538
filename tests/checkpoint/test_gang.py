"""The errors of failed collectives, and the messages between ranks: JSON of a known type and nothing else."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from holdfast import collectives as gangs
from holdfast.checkpoint import StateDigest
from holdfast.collectives import Gang, is_lost_peer, use_json_for_objects
from holdfast.spec.errors import DataError, ExitCode, FencedError, HoldfastError
from tests.checkpoint.ranks import in_ranks, process_group
from tests.whole.attacks import Payload


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (DistNetworkError("The client socket has timed out"), True),
        (DistStoreError("Socket Timeout"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("peer access is not supported between these two devices"), False),
        (RuntimeError("CUDA error: peer access has not been enabled"), False),
        (RuntimeError("NCCL was not built"), False),
        (RuntimeError("data loader timed out"), False),
        (DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"), False),
        (RuntimeError("[enforce fail at /x/gloo/transport/tcp/pair.cc:446] op.nbytes. 8 vs 4"), False),
        (ValueError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_only_errors_of_a_lost_rank_count_as_a_lost_peer(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def fenced() -> int:
    raise FencedError("a newer attempt has begun")


def full() -> None:
    error = HoldfastError("no space")
    error.exit_code = ExitCode.NO_SPACE
    raise error


def _refused(action: Any, *kinds: type[BaseException]) -> str:
    try:
        action()
    except kinds as error:
        code = getattr(error, "exit_code", None)
        return f"{type(error).__name__} {code}"
    return "taken"


def _exchange(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """All messages that two ranks exchange."""
    use_json_for_objects()
    gangs.MAX_MESSAGE_BYTES = 1 << 16
    results: dict[str, Any] = {}
    with process_group(folder / "meeting", rank, size):
        gang = Gang()
        results["digests"] = gang.all_gather(StateDigest(rank, 2**64 - 1), StateDigest)
        results["rates"] = gang.all_gather({rank: math.inf, 7: 0.1 + rank}, dict[int, float])
        results["optional"] = gang.all_gather("x" * 70 if rank else None, str | None)
        results["broadcast"] = gang.broadcast((1, "one") if rank == 1 else (0, ""), tuple[int, str], source=1)
        results["from rank 0"] = gang.from_rank_0(lambda: [1, 2], list[int])
        results["nothing"] = gang.from_rank_0(lambda: None)
        results["fenced"] = _refused(lambda: gang.from_rank_0(fenced, int), HoldfastError)
        results["full"] = _refused(lambda: gang.from_rank_0(full), HoldfastError)
        wrong = int if rank else str
        results["another type"] = _refused(lambda: gang.all_gather(5 if rank else "five", wrong), DataError)
        results["too long"] = _refused(lambda: gang.all_gather("x" * (70_000 * rank), str), DataError)

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "long": "x" * 50 * rank})
        results["objects"] = [message["rank"] for message in objects]
        results["no JSON"] = _refused(lambda: dist.all_gather_object(objects, Payload(folder / "executed")), TypeError)
        if rank:  # an attacker in place of rank 1 sends a pickle, as torch does
            data = torch.frombuffer(bytearray(pickle.dumps(Payload(folder / "executed"))), dtype=torch.uint8)
            dist.send(torch.tensor([len(data)]), 0)
            dist.send(data, 0)
        else:
            results["a pickle"] = _refused(lambda: dist.recv_object_list([None], src=1), ValueError)
    return results


def test_ranks_take_json_of_a_known_type_from_each_other_and_unpickle_nothing(tmp_path: Path) -> None:
    first, second = in_ranks(2, _exchange, tmp_path)
    assert first.pop("a pickle") in ("JSONDecodeError None", "UnicodeDecodeError None")
    assert not (tmp_path / "executed").exists()
    assert first["digests"] == [StateDigest(0, 2**64 - 1), StateDigest(1, 2**64 - 1)]
    assert first["rates"] == [{0: math.inf, 7: 0.1}, {1: math.inf, 7: 1.1}]
    assert first["optional"] == [None, "x" * 70]
    assert first["objects"] == [0, 1]
    assert first == second | {"another type": first["another type"]}
    assert {name: value for name, value in second.items() if isinstance(value, str)} == {
        "fenced": f"FencedError {ExitCode.FENCED!s}",
        "full": f"HoldfastError {ExitCode.NO_SPACE!s}",
        "another type": f"DataError {ExitCode.BAD_DATA!s}",
        "too long": f"DataError {ExitCode.BAD_DATA!s}",
        "no JSON": "TypeError None",
    }
    assert (second["broadcast"], second["from rank 0"], second["nothing"]) == ((1, "one"), [1, 2], None)
