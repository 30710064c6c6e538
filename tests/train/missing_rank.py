"""Two ranks that meet and join one collective. Rank 1 never joins the second one."""

import os
import sys

import torch
import torch.distributed as dist

from holdfast.collectives import noticing_lost_peers
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.setup import meet
from holdfast.runtime.exits import exit_code_of
from tests.train.tiny_run import tiny_assignment


def _train() -> None:
    meet(tiny_assignment("cluster.collective_timeout_minutes=0.1"), PreemptionSignal())
    ones = torch.ones(4)
    dist.all_reduce(ones)  # both join
    assert ones[0] == 2
    print("joined", flush=True)
    if os.environ["RANK"] == "1":
        sys.stdin.read()  # alive, with open connections, until the test ends it
    with noticing_lost_peers():  # as around the loop of a rank
        dist.all_reduce(ones)


if __name__ == "__main__":
    os._exit(exit_code_of(_train))
