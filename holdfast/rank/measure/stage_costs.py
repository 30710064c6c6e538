"""Costs of the parts of a pipeline's stages here, by a one-process program that `holdfast plan --measure` starts.

It computes the embedding, one layer and the head of a spec's model, forward and backward, on a micro-batch at the
spec's precision. It writes the median seconds of each as `planning.stages.StageCosts`. Tensor and context parallelism
are not applied: they would divide all three parts, so the ratios hold.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.launch.processes import die_with_parent
from holdfast.planning.schedule import StageCosts
from holdfast.spec import Spec

if TYPE_CHECKING:  # torch takes seconds to import, in which this process would outlive its parent
    import torch
    from torch import Tensor

NOT_COUNTED = 2  # first repetitions, which allocate memory and choose kernels


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a spec as JSON")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    spec = Spec.model_validate_json(arguments.spec.read_text(encoding="utf-8"))
    costs = measured(spec, arguments.vocabulary, arguments.repetitions)
    arguments.out.write_text(costs.model_dump_json(), encoding="utf-8")


def measured(spec: Spec, vocabulary: int, repetitions: int) -> StageCosts:
    """The costs on the spec's accelerator, or with its threads on the CPU. Raises MissingError without that
    accelerator."""
    import torch

    from holdfast.engines.recompute import recompute
    from holdfast.engines.torch.fp8 import convert_to_fp8, require_fp8
    from holdfast.engines.torch.parallelize import NARROW
    from holdfast.launch.device import device_name, local_device
    from holdfast.model.decoder import Decoder

    torch.set_num_threads(spec.parallel.threads)
    device, training = local_device(spec.cluster.accelerator), spec.training
    if training.precision == "fp8":
        require_fp8(device)
    narrow = NARROW.get(training.precision, torch.float32)
    model = spec.model.model_copy(update={"layers": 1})
    decoder = Decoder.empty(model, vocabulary, device)
    decoder.loss_chunk = training.loss_chunk
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for parameter in decoder.parameters():  # as FSDP2 casts them; the rotary tables are unchanged
        parameter.data = parameter.data.to(narrow)
    convert_to_fp8(decoder, training.precision)
    layer = decoder.model.layers[0]
    recompute(layer, training.activation_checkpointing)
    if training.compile:
        layer.compile()
    shape = (training.micro_batch, model.context)
    tokens_BT = torch.randint(vocabulary, shape, device=device)  # noqa: N806
    x_BTD = torch.randn(*shape, model.hidden, device=device, dtype=narrow).requires_grad_()  # noqa: N806

    def timed(forward: Callable[[], Tensor]) -> float:
        return _median_seconds(device, forward, repetitions)

    return StageCosts(
        device=device_name(device),
        embedding=timed(lambda: decoder.model.embed_tokens(tokens_BT)),
        layer=timed(lambda: decoder.through(x_BTD, 0, model.context)[0]),
        head=timed(lambda: decoder.loss(decoder.model.norm(x_BTD), tokens_BT, "sum")),
    )


def _median_seconds(device: torch.device, forward: Callable[[], Tensor], repetitions: int) -> float:
    import torch

    from holdfast.health.compute import settle_on

    times, settle = [], settle_on(device)
    for _ in range(NOT_COUNTED + repetitions):
        start = time.perf_counter()
        result = forward()
        result.backward(torch.ones_like(result))
        settle()
        times.append(time.perf_counter() - start)
    return statistics.median(times[NOT_COUNTED:])


if __name__ == "__main__":
    main()
