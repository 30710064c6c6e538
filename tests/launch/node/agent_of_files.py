"""An agent whose checkpoints are files in a folder, and a rank that hands saves to it. It replaces the store in the
tests of how agent and ranks live and die."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.checkpoint import TensorBox
from holdfast.checkpoint.agent import service
from holdfast.checkpoint.agent.buffers import boxes_in, laid_out
from holdfast.checkpoint.agent.client import AgentClient
from holdfast.checkpoint.agent.protocol import Outcome, Save, SaveRequest, Writer
from holdfast.launch.node import agent
from holdfast.spec.errors import HoldfastError, StoreUnreachableError

ELEMENTS = 1 << 16


class FileWork:
    """Parts are files `part-<rank>-<step>`, a commit is `step-<step>`; while `hold` exists, nothing is written."""

    def __init__(self, writer: Writer) -> None:
        self._folder, self._rank, self._world = Path(writer.store), writer.rank, writer.world
        self.leads = writer.rank == 0

    def write(self, request: SaveRequest, boxes: Sequence[TensorBox]) -> None:
        step = request.step
        (self._folder / f"begun-{self._rank}-{step}").touch()
        while (self._folder / "hold").exists():
            time.sleep(0.005)
        if (self._folder / f"refuse-{step}").exists():
            raise StoreUnreachableError("the folder is away")
        path = self._folder / f"part-{self._rank}-{step}"
        path.with_name(f"unfinished-{self._rank}").write_bytes(b"".join(box.data.numpy().tobytes() for box in boxes))
        path.with_name(f"unfinished-{self._rank}").rename(path)

    def commit(self, request: SaveRequest) -> int:
        step = request.step
        waited = set(range(self._world))
        while waited:
            for rank in sorted(waited):
                if (failed := self._folder / f"failed-{rank}-{step}").exists():
                    raise StoreUnreachableError(failed.read_text())
                if (self._folder / f"part-{rank}-{step}").exists():
                    waited.remove(rank)
            time.sleep(0.005)
        (self._folder / f"step-{step}").write_text(f"{request.scalars} {request.attachments}")
        return ELEMENTS

    def give_up(self, step: int, failure: HoldfastError) -> None:
        path = self._folder / f"failed-{self._rank}-{step}"
        path.with_name(f"failing-{self._rank}").write_text(str(failure))
        path.with_name(f"failing-{self._rank}").rename(path)  # another rank reads it as soon as it exists

    def lift(self) -> None:
        """This agent holds no commit back."""

    def hurry(self) -> None:
        """No wait here is longer than the test's."""

    def after_commit(self, step: int) -> None:
        (self._folder / f"collected-{step}").touch()


def content(rank: int, step: int) -> torch.Tensor:
    """What a rank saves at a step."""
    return torch.arange(ELEMENTS, dtype=torch.float32) * (1 + rank) + step


def rank_main() -> None:
    """Save at `steps`, into alternating buffers, and print the outcomes; then wait to be killed."""
    path, folder, rank, world, *steps = sys.argv[1:]

    def tell(outcome: Outcome) -> None:
        print(outcome.step, outcome.what, outcome.reason or outcome.bytes, flush=True)

    link = AgentClient(
        path, Writer(store=folder, run_id="run", attempt=1, launch=1, rank=int(rank), world=int(world)), tell
    )
    for number, step in enumerate(map(int, steps)):
        box = TensorBox.whole("weights", content(int(rank), step))
        slots, size = laid_out([box])
        boxes_in(link.allocate(number % 2, size), slots)[0].data.copy_(box.data)
        request = SaveRequest(step=step, scalars={"step": step}, attachments={"a": "b"})
        link.save(Save(request=request, buffer=number % 2, slots=slots))
    print("handed over", flush=True)
    while True:
        time.sleep(60)


def main() -> None:
    """Run the agent, or a rank when there are arguments after the agent's socket."""
    if len(sys.argv) > 2:
        rank_main()
    agent.main(lambda path: service.Agent(FileWork).serve(path))
