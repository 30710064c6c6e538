"""The trained parameters of a rank: their canonical names, their layouts over all ranks, their gradients."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.engines.groups import group_of
from holdfast.engines.layout import TensorLayout, local
from holdfast.engines.torch.lamb import Rows
from holdfast.engines.torch.tied import TiedEnds
from holdfast.spec.training import ParameterGroup


def freeze(part: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Freeze the parameters that the spec's groups name."""
    for name, parameter in part.named_parameters():
        if parameter.requires_grad and group_of(name, groups).frozen:
            parameter.requires_grad_(False)


class TrainedParameters:
    """The trained parameters of this rank's part of the model."""

    def __init__(self, parts: Sequence[nn.Module], rank: int, world: int, tied: TiedEnds | None) -> None:
        """`parts` is the model, or this rank's stages of it, spread over the ranks already."""
        self._parts, self._rank, self._world, self._tied = parts, rank, world, tied

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by canonical name."""
        parameters = chain.from_iterable(part.named_parameters() for part in self._parts)
        return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)

    def frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are not trained, by canonical name."""
        parameters = chain.from_iterable(part.named_parameters() for part in self._parts)
        return ((name, parameter) for name, parameter in parameters if not parameter.requires_grad)

    def layout_of(self, name: str, parameter: nn.Parameter) -> TensorLayout:
        """The layout of a parameter over all ranks."""
        layout = TensorLayout.of(name, parameter)
        if not isinstance(parameter, DTensor):
            return layout.among(self._world, self._rank)
        return layout if self._tied is None else self._tied.layout_of(layout)

    def rows(self) -> Iterator[tuple[nn.Parameter, Rows]]:
        """Each parameter with the rows of it that this rank holds."""
        for name, parameter in self.named():
            layout = self.layout_of(name, parameter)
            yield parameter, Rows(layout.part()[0][0], layout.shape[0], layout.copy == 0)

    def gradients(self) -> Iterator[tuple[TensorLayout, torch.Tensor]]:
        """The layout of each gradient, and this rank's part of it."""
        for name, parameter in self.named():
            assert parameter.grad is not None
            yield self.layout_of(name, parameter), local(parameter.grad)
