"""Load balancing of experts without a loss: router biases that change after each step (DeepSeek-V3, section 2.1.2).

Every rank changes them alike, because they depend on integers summed over all ranks. They are state: saved, restored,
and compared between the ranks of their stage like any shared tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from holdfast.model.decoder import Decoder
from holdfast.model.experts import CORRECTION, Router
from holdfast.model.layers import Mixture
from holdfast.spec.model import Routing


class Balance:
    """The routers with biases in a rank's part of a model. Most models have none."""

    def __init__(self, parts: Sequence[Decoder], routing: Routing) -> None:
        """Biases are 0 until the state is filled in."""
        self._routing, self._layers = routing, len(parts[0].model.layers)
        self._routers: dict[int, Router] = {
            index: layer.mlp.gate
            for part in parts
            for index, layer in enumerate(part.model.layers)
            if layer is not None and isinstance(layer.mlp, Mixture) and layer.mlp.gate.biased
        }
        for _, bias in self.state():
            bias.zero_()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The biases by their canonical names."""
        return (
            (f"model.layers.{index}.mlp.gate.{CORRECTION}", getattr(router, CORRECTION))
            for index, router in self._routers.items()
        )

    def forget(self) -> None:
        """Drop the token counts of a computation that was no step."""
        for router in self._routers.values():
            router.tokens_E = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore the token counts of the computation inside the context."""
        before = {layer: router.tokens_E for layer, router in self._routers.items()}
        yield
        for layer, tokens in before.items():
            self._routers[layer].tokens_E = tokens

    def step(self, held: torch.Tensor | None = None) -> None:
        """Add one bias step to experts with less than their share of the global batch, and subtract one from those
        with more. Nothing changes if the update of the weights was held back (1.0). A collective call."""
        counts_by_layer = {
            layer: router.tokens_E for layer, router in self._routers.items() if router.tokens_E is not None
        }
        if counts_by_layer and self._routing.balance == "bias":
            counts_of_one = next(iter(counts_by_layer.values()))
            tokens = counts_of_one.new_zeros(
                self._layers, len(counts_of_one)
            )  # of the whole model: pipeline stages fill different rows
            for layer, counts in counts_by_layer.items():
                tokens[layer] = counts
            if dist.is_initialized():
                dist.all_reduce(tokens)
            lacking = (tokens.sum(1, keepdim=True) - tokens * tokens.shape[1]).sign()
            if held is not None:
                lacking = lacking * (1 - held).to(lacking.dtype)
            for layer, router in self._routers.items():
                bias = getattr(router, CORRECTION)
                bias.add_(lacking[layer].to(bias.dtype), alpha=self._routing.bias_step)
        self.forget()
