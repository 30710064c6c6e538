"""Exponential moving average of the trained weights.

The average has the layout of the weights and is part of the state. No operation fuses an addition and a multiplication,
so an element gets the same bits wherever a shard ends (see `lamb`).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from holdfast.engines.layout import local


class AveragedWeights:
    """The averages of some parameters, on their devices."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        """`parameters` by canonical name. The averages are undefined until they are filled."""
        self._decay = decay
        self._pairs = {name: (parameter, torch.zeros_like(parameter.detach())) for name, parameter in parameters}

    def __getitem__(self, name: str) -> Tensor:
        """The average of a parameter, in its layout."""
        return self._pairs[name][1]

    def __iter__(self) -> Iterator[str]:
        """The names of the parameters."""
        return iter(self._pairs)

    @torch.no_grad()
    def update(self, held: Tensor | None) -> None:
        """Take the weights after an update. If `held` is 1.0, nothing changes."""
        for parameter, average in self._pairs.values():
            weights, values = local(parameter), local(average)
            after = (values * self._decay).add_(weights * (1 - self._decay))
            values.copy_(after if held is None else torch.where(held.to(values.device).bool(), values, after))
