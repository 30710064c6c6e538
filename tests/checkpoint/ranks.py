"""Real ranks for tests: a function that runs in several processes, which can form a gloo group."""

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._dynamo", "torch._inductor.compile_fx",  # DeepSpeed's optimizers ask for the compiler when they are imported
    "holdfast.rank.worker", "holdfast.engines.torch.engine",
    "tests.checkpoint.preloaded", "tests.checkpoint.ranks", "tests.train.ranks", "tests.checkpoint.frozen",
]  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")  # imports torch once, not once a rank
_CONTEXT.set_forkserver_preload(PRELOADED)


def in_ranks(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0) -> list[Any]:
    """Run `function(rank, size, *arguments)` in one process per rank. Returns each rank's result, or None for a killed
    rank. Fails with a rank's traceback.
    """
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _CONTEXT.Process(target=_rank, args=(sender, function, rank, size, *arguments), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    results = []
    try:
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(seconds), f"rank {rank} sent nothing for {seconds:g} s"
            try:
                failed, value = receiver.recv()
            except EOFError:
                failed, value = False, None
            assert not failed, f"rank {rank}: {value}"
            results.append(value)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _rank(sender: Connection, function: Callable[..., Any], rank: int, size: int, *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        assert not (cold := [name for name in PRELOADED if name not in sys.modules]), f"each rank imports {cold}"
        sender.send((False, function(rank, size, *arguments)))
    except BaseException:  # noqa: BLE001
        sender.send((True, traceback.format_exc()))


@contextmanager
def process_group(meeting: Path, rank: int, size: int, seconds: float = 180.0) -> Iterator[None]:
    """Form a gloo group of the ranks below `size`. Each group needs a separate `meeting` file."""
    import torch.distributed as dist

    if size == 1:
        yield
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
