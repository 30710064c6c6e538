"""Expert parallelism: each layer's experts are distributed over the ranks of a group, and tokens are sent to their
experts.

Each rank computes its rows up to the router and sends each token to the ranks with its experts. It computes the
received tokens and sends the results back. No token is dropped. An expert computes in a fixed order: by rank, then by
the order of each rank's tokens. See GShard (Lepikhin et al. 2020) and, without capacities, MegaBlocks (Gale et al.
2022).
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case, as in `model.experts`
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.model.decoder import Decoder
from holdfast.model.experts import Experts, Matrices, Permuted, grouped, permuted
from holdfast.model.layers import Mixture


def apply_expert_parallel(decoder: Decoder, mesh: DeviceMesh, tensor: int) -> list[Experts]:
    """Keep on each rank of `mesh`, which has one dimension, its run of each layer's experts. Their matrices become
    DTensors on it. Returns the experts of each layer. `tensor` is the number of ranks whose rows count as one in the
    average, each with other tokens of them."""
    layers = [layer for layer in decoder.model.layers if layer is not None]  # a pipeline stage has only some layers
    all_experts = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, Mixture)]
    for experts in all_experts:
        for module in experts.modules():  # with adapters there are several
            for name, parameter in list(module.named_parameters(recurse=False)):  # on meta: nothing to send
                cut = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):  # codes and scales of NF4
                cut = distribute_tensor(buffer, mesh, [Shard(0)], src_data_rank=None)
                module.register_buffer(name, cut, persistent=False)
        experts.compute = Exchange(mesh.get_group(), tensor)
    return all_experts


class Exchange:
    """Computes rows on the ranks that hold their experts. `grouped` does the same for local experts."""

    def __init__(self, group: dist.ProcessGroup, tensor: int) -> None:
        self._group = group
        self._averaged = group.size() / tensor

    def __call__(self, x_SD: Tensor, ends_E: Tensor, weights: Matrices) -> Tensor:
        """See `grouped`. All ranks of the group call it together."""
        ranks = self._group.size()
        weights = weights.with_tensors(self._here)
        if ranks == 1:
            return grouped(x_SD, ends_E, weights)
        sent = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ranks, -1)  # rows to each rank, for each of its experts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        out, back = sent.sum(1).tolist(), received.sum(1).tolist()
        x_SD = _exchange(x_SD, back, out, self._group)
        expert_S = torch.arange(sent.shape[1], device=sent.device).repeat(ranks).repeat_interleave(received.flatten())
        order_S = expert_S.argsort(stable=True)  # from order by rank and expert, to order by expert and rank
        x_SD, inverse_S = permuted(x_SD, order_S)
        y_SD = grouped(x_SD, received.sum(0).cumsum(0), weights)
        return _exchange(Permuted.apply(y_SD, inverse_S, order_S), out, back, self._group)

    def _here(self, matrix: Tensor) -> Tensor:
        """The local part of a matrix of experts. Its gradient covers the rows of all ranks of the group, so it is
        divided by their number. The average over ranks does the same for other weights. The averaging of these
        experts covers only the remaining ranks. Ranks with parts of the same rows are summed and count as one."""
        local_matrix = matrix.to_local() if isinstance(matrix, DTensor) else matrix
        if local_matrix.requires_grad:
            local_matrix.register_hook(lambda gradient: gradient / self._averaged)
        return local_matrix


def _exchange(x_SD: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows over the ranks. Returns the rows received here, in rank order, with `received[r]` rows from rank
    r."""
    return all_to_all_single_autograd(x_SD.contiguous(), received, sent, group)
