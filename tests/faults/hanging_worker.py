"""A rank that hangs in a step. HOLDFAST_TEST_HANGS is "rank:step:how". With `collective`, the rank waits before its
next batch in a collective that no other rank calls. With `node`, a signal stops it and all processes of its node.
"""

import os
from collections.abc import Iterator

import psutil
import torch.distributed as dist

from holdfast.dataset import Prefetcher
from holdfast.dataset.batches import Item
from holdfast.rank import worker


def main() -> None:
    """See `worker.main`."""
    rank, step, how = os.environ["HOLDFAST_TEST_HANGS"].split(":")
    if os.environ["RANK"] == rank:
        _hang(int(step), how)
    worker.main()


def _hang(step: int, how: str) -> None:
    iterate = Prefetcher.__iter__

    def batches(self: Prefetcher) -> Iterator[Item]:
        for number, rows in iterate(self):
            if how == "collective" and number == step:
                dist.barrier()
            if how == "node" and number == step:
                _stop()
            yield number, rows

    Prefetcher.__iter__ = batches  # type: ignore[method-assign]


def _stop() -> None:
    rank = psutil.Process()
    server = rank.parent()
    assert server is not None
    torchrun = server.parent()
    assert torchrun is not None
    others = [torchrun, *(process for process in torchrun.children(recursive=True) if process.pid != rank.pid)]
    for process in others:
        process.suspend()
    rank.suspend()
