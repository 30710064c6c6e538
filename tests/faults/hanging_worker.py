"""A rank that hangs in a step: HOLDFAST_TEST_HANGS says which rank, in which step and how, "rank:step:how". `data`: its
next batch does not come; `collective`: before its next batch it waits in one that no other rank calls;
`stop`: it is stopped by a signal; `node`: and so is all that runs on its node."""

from __future__ import annotations

import os
import time

import psutil
import torch.distributed as dist

from holdfast.dataset import Prefetcher
from holdfast.dataset.batches import Batches
from holdfast.rank import worker


def main() -> None:
    """See `worker.main`."""
    rank, step, how = os.environ["HOLDFAST_TEST_HANGS"].split(":")
    if os.environ["RANK"] == rank:
        _hang(int(step), how)
    worker.main()


def _hang(step: int, how: str) -> None:
    read, iterate = Batches.batch, Prefetcher.__iter__

    def batch(self, number, rows):
        while how == "data" and number == step:
            time.sleep(1.0)
        return read(self, number, rows)

    def batches(self):
        for number, rows in iterate(self):
            if how == "collective" and number == step:
                dist.barrier()
            if how in ("stop", "node") and number == step:
                _stop(whole_node=how == "node")
            yield number, rows

    Batches.batch, Prefetcher.__iter__ = batch, batches


def _stop(whole_node: bool) -> None:
    mine = psutil.Process()
    server = mine.parent()
    assert server is not None
    torchrun = server.parent()
    assert torchrun is not None
    others = [torchrun, *(one for one in torchrun.children(recursive=True) if one.pid != mine.pid)]
    for one in others if whole_node else ():
        one.suspend()
    mine.suspend()
