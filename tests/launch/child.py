"""A warm process that acts by its first argument: `say` prints its state, `sums` a digest of many sums, `collect`
whether objects are frozen; `leave CODE`, `fail`, `wait`."""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch


def main() -> int | None:
    action, *more = sys.argv[1:]
    if action == "say":
        state = {"environment": dict(os.environ), "session": os.getsid(0) == os.getpid(), "folder": str(Path.cwd())}
        print(json.dumps({**state, "title": Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode()}))
    elif action == "collect":
        gc.collect()
        print(json.dumps([gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 100_000]))
    elif action == "sums":
        print(sums(*map(int, more)))
    elif action == "leave":
        return int(more[0])
    elif action == "fail":
        raise RuntimeError("a bug")
    else:
        print(f"{os.getpid()} waits", flush=True)
        threading.Event().wait(600)
    return None


def sums(threads: int) -> str:
    """A digest of the bits of sums that depend on the kernels and on the number of threads that split them."""
    from blake3 import blake3

    torch.set_num_threads(threads)
    torch.manual_seed(3)
    left, right = torch.randn(257, 1031, requires_grad=True), torch.randn(1031, 129)
    torch.nn.functional.layer_norm((left @ right).softmax(-1), [129]).square().sum().backward()
    values = [left.grad, torch.randn(1_000_003).sum(), (left @ right).bfloat16() @ right.T.bfloat16()]
    parts = b"".join(value.detach().float().numpy().tobytes() for value in values if value is not None)
    return f"{torch.get_num_threads()} threads {torch.backends.cpu.get_cpu_capability()} {blake3(parts).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
