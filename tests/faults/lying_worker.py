"""A rank whose hardware computes wrong. HOLDFAST_TEST_LIES is "rank:step": where a bit of a weight is flipped."""

import os
from typing import Any

import torch

from holdfast.engines.interface import StepOutput
from holdfast.engines.torch.engine import TorchEngine
from holdfast.rank import worker


def main() -> None:
    """See `worker.main`."""
    rank, step = os.environ["HOLDFAST_TEST_LIES"].split(":")
    sound, calls = TorchEngine.step, [0]

    def wrong(self: TorchEngine, *given: Any, **more: Any) -> StepOutput:
        output = sound(self, *given, **more)
        calls[0] += 1
        if os.environ["RANK"] == rank and calls[0] == int(step):
            box = next(box for box in self.boxes() if box.name == "model.layers.1.mlp.up_proj.weight")
            box.data.view(torch.int32)[3, 5] ^= 1
        return output

    TorchEngine.step = wrong  # type: ignore[method-assign]
    worker.main()
