"""Time of one step: computation, exposed communication, and waiting.

A matrix product takes the longer of two times (the roofline model). One is its FLOPs at the share of the peak that
large products reach. The other is its bytes at the memory's bandwidth. Element-wise operations take their bytes.
Gradients and weights travel during computation; tensor, expert and pipeline traffic does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.planning.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    group,
    point_to_point,
    reduce_scatter,
)
from holdfast.planning.hardware import Accelerator
from holdfast.planning.layout import Layout
from holdfast.planning.memory import BYTES, offloaded, stage_parameters
from holdfast.planning.practice import Practice
from holdfast.planning.schedule import bubble
from holdfast.planning.shape import Architecture

KERNELS = 30  # per forward pass of a layer; its backward pass has twice as many
HIDDEN = 0.9  # share of the computation that can hide communication, without the first and last layer
HOST_LINK = 25e9  # bytes per second between an accelerator and its host (PCIe 4.0 or 5.0 x16, typical measurement)
DISK = 3e9  # bytes per second of one rank's share of its node's disks: an assumption, not measured


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, by cause."""

    terms: Mapping[str, float]
    tokens: float  # per step
    model_flops: float  # per step, that the model needs
    hardware_flops: float  # including recomputation
    ranks: int
    peak: float  # FLOP/s of one accelerator

    @property
    def seconds(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all accelerators."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the FLOPs that the model needs, over the peak of all accelerators."""
        return self.model_flops / (self.seconds * self.ranks * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: like `mfu`, including recomputation."""
        return self.hardware_flops / (self.seconds * self.ranks * self.peak)

    @property
    def flops_per_rank(self) -> float:
        """Model FLOP/s per accelerator."""
        return self.model_flops / (self.seconds * self.ranks)


@dataclass(frozen=True)
class _Pass:
    """Seconds of a layer for one micro-batch on one rank, forward."""

    products: float
    attention: float
    elements: float
    tensor: float  # communication of tensor-parallel ranks
    expert: float
    context: float

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.elements

    @property
    def total(self) -> float:
        return self.computing + self.tensor + self.expert + self.context


def speed(
    shape: Architecture,
    layout: Layout,
    accelerator: Accelerator,
    *,
    global_batch: int,
    precision: str,
    practice: Practice,
    compiled: bool = True,
) -> Speed:
    """The time of one step of `global_batch` sequences. `compiled`: element-wise operations are fused."""
    device, micro_batches = accelerator, layout.micro_batches(global_batch)
    layers = -(-shape.layers // layout.pipeline)
    forward = _layer(shape, layout, device, precision, practice, compiled)
    head = _head(shape, layout, device, precision)
    recomputing = _again(forward, layout, practice)
    floor = KERNELS * device.kernel_seconds
    layer_seconds = max(forward.total, floor) + max(2 * forward.total - forward.context, 2 * floor) + recomputing
    ends = head / layout.pipeline if layout.pipeline > 1 else head  # the last stage gets fewer layers
    stage = layers * layer_seconds + ends
    working = micro_batches * stage
    terms = {
        "products": micro_batches * (layers * 3 * forward.products + ends),
        "attention": micro_batches * layers * 3 * forward.attention,
        "element-wise": micro_batches * layers * 3 * forward.elements,
        "recomputing": micro_batches * layers * recomputing,
        "tensor traffic": micro_batches * layers * 3 * forward.tensor,
        "expert traffic": micro_batches * layers * 3 * forward.expert,
        "context traffic": micro_batches * layers * 2 * forward.context,
    }
    terms["host"] = max(0.0, working - sum(terms.values()))
    terms["bubble"] = bubble(layout, micro_batches) * working
    terms["pipeline traffic"] = _between_stages(shape, layout, device, precision, micro_batches)
    terms["data traffic"] = _data(shape, layout, device, precision, practice, micro_batches, stage)
    terms["update"] = _update(shape, layout, device, practice)
    tokens = float(global_batch * shape.context)
    extra = _extra_flops(shape, layout, practice)
    return Speed(
        {name: value for name, value in terms.items() if value},
        tokens,
        tokens * shape.model_products(),
        tokens * (shape.model_products() + extra),
        layout.ranks,
        device.peak(precision),
    )


def _layer(
    shape: Architecture, layout: Layout, here: Accelerator, precision: str, practice: Practice, compiled: bool
) -> _Pass:
    size = BYTES[precision]
    own = layout.micro_batch * shape.context / layout.context  # tokens of the tensor-parallel group
    rate = here.peak(precision) * here.reach
    memory = here.bandwidth * here.bandwidth_reach
    tensor = layout.tensor

    dense = shape.attention_weights + shape.expert_weights * (shape.shared if shape.experts > 1 else 1)
    products = max(2 * own * dense / tensor / rate, size * dense / tensor / memory)
    if shape.experts > 1:
        weights = shape.experts / layout.expert * shape.expert_weights
        products += max(2 * own * shape.active * shape.expert_weights / tensor / rate, size * weights / memory)
    # Attention has the same peak at every precision except fp8, which is for products alone.
    core = shape.attention_products(causal=practice.flash)
    attention = own * core / tensor / (here.peak("bf16" if precision == "fp8" else precision) * here.attention_reach)
    wide = (3 if compiled else 5) if shape.gated else (2 if compiled else 4)
    elements = (10 if compiled else 18) * shape.hidden + 2 * (shape.query_width + shape.key_width)
    elements += wide * shape.ffn * shape.met
    scores = 0.0 if practice.flash else 6.5 * shape.heads * shape.context
    dropped = 6 * shape.hidden if shape.dropout else 0
    moved = own / tensor * size * (elements + scores + dropped) / memory

    among = group(here, tensor)
    stream = own * shape.hidden * size
    cuts = 2 if shape.experts == 1 or shape.shared else 1  # split matrices: attention's, and the feed-forward layer's
    tensor_traffic = 2 * cuts * all_gather(stream, among)  # a gather and a scatter each, which take equally long
    experts = 0.0
    if shape.experts > 1:
        experts = 2 * all_to_all(own / tensor * shape.active * shape.hidden * size, group(here, layout.expert))
    context = 0.0
    if layout.context > 1:  # keys and values are gathered, and their gradients scattered in fp32: mean of both
        over = group(here, layout.context, tensor)
        kv = 2 * own * layout.context * shape.key_width / tensor
        context = (all_gather(kv * size, over) + reduce_scatter(kv * 4, over)) / 2
    return _Pass(products, attention, moved, tensor_traffic, experts, context)


def _head(shape: Architecture, layout: Layout, here: Accelerator, precision: str) -> float:
    """Seconds of the output head and the loss for one micro-batch, forward and backward."""
    tokens = layout.micro_batch * shape.context / layout.context
    rate = here.peak("bf16" if precision == "fp8" else precision) * here.reach
    logits = tokens * shape.vocabulary / layout.tensor
    # Logits are computed again in the backward pass.
    return 4 * tokens * shape.head_products() / layout.tensor / rate + logits * 24 / (
        here.bandwidth * here.bandwidth_reach
    )


def _again(forward: _Pass, layout: Layout, practice: Practice) -> float:
    """Seconds of the recomputation of a layer."""
    if layout.checkpointing == "full":
        return forward.total
    if layout.checkpointing == "none":
        return 0.0
    return forward.elements if practice.selective == "products" else forward.attention + 0.5 * forward.elements


def _extra_flops(shape: Architecture, layout: Layout, practice: Practice) -> float:
    """Recomputed FLOPs per token."""
    if layout.checkpointing == "full":
        return shape.layers * (shape.layer_products() + shape.attention_products(causal=False))
    if layout.checkpointing == "selective" and practice.selective == "attention":
        return shape.layers * shape.attention_products(causal=False)
    return 0.0


def _between_stages(
    shape: Architecture, layout: Layout, here: Accelerator, precision: str, micro_batches: int
) -> float:
    """Seconds of exposed sends and receives: one in each direction per micro-batch and chunk."""
    if layout.pipeline == 1:
        return 0.0
    across = Group(2, 1 if layout.tensor * layout.context * layout.pipeline > here.node else 2, here)
    message_bytes = (
        layout.micro_batch * shape.context / layout.context * shape.hidden * BYTES[precision] / layout.tensor
    )
    return 2 * micro_batches * layout.chunks * point_to_point(message_bytes, across)


def _data(
    shape: Architecture,
    layout: Layout,
    here: Accelerator,
    precision: str,
    practice: Practice,
    micro_batches: int,
    stage_seconds: float,
) -> float:
    """Seconds of gradients and gathered weights that no computation hides."""
    replicas = layout.data * layout.context
    away, read = "gradients" in offloaded(layout, here), layout.offload == "parameters_on_disk"
    if replicas == 1 and not away and not read:
        return 0.0
    dense, experts, ends = stage_parameters(shape, layout, 0)
    elements = dense + ends + experts
    stride = layout.tensor
    everyone = group(here, replicas, stride)
    gradients = 4.0 if layout.sharding == "full" else float(practice.state.gradients)
    # A CPU does both computation and communication, so nothing is hidden.
    hiding = 0.0 if here.kind == "cpu" else HIDDEN * stage_seconds
    backward = hiding * 2 / 3
    if layout.sharding == "full":
        shards = group(here, layout.shard * layout.context, stride)
        up = gradients * elements / shards.size / HOST_LINK if away else 0.0
        forward_gather = all_gather(BYTES[precision] * elements, shards) + up
        scatter = reduce_scatter(gradients * elements, shards)
        exposed = max(0.0, forward_gather - hiding / 3)
        regather = 0.0 if layout.keeps_gathered else forward_gather
        exposed += max(0.0, regather + scatter - backward)
        exposed += 1.75 * up  # exposed: gradients move down and are added, 12 bytes for 4 at four times the rate
        total = micro_batches * exposed
        if read:  # read in each pass, which waits for it, and written once
            passes = micro_batches * (2 if layout.checkpointing == "none" else 3)
            total += (passes + 1) * BYTES[precision] * elements / shards.size / DISK
        if replicas > shards.size:
            copies = group(here, replicas // shards.size, stride * shards.size)
            total += max(0.0, all_reduce(gradients * elements / shards.size, copies) - backward)
        return total
    if layout.sharding == "optimizer":
        scatter_seconds = reduce_scatter(gradients * elements, everyone)
        return max(0.0, scatter_seconds - backward) + all_gather(practice.state.weights * elements, everyone)
    return max(0.0, all_reduce(gradients * elements, everyone) - backward)


def _update(shape: Architecture, layout: Layout, here: Accelerator, practice: Practice) -> float:
    """Seconds of the optimizer, which reads weights, gradients and moments once and writes all but gradients."""
    dense, experts, ends = stage_parameters(shape, layout, 0)
    share = 1 if layout.sharding == "none" else layout.shard * layout.context
    elements = (dense + ends) / share + experts / layout.expert_shards(share)
    state = practice.state
    moved = elements * (2 * (state.weights + state.optimizer) + state.gradients)
    if offloaded_parts := offloaded(layout, here):
        back_and_forth = (
            0.0 if "gradients" in offloaded_parts else elements * (state.gradients + state.weights) / HOST_LINK
        )
        swapped = 2 * elements * (state.weights + state.optimizer + state.gradients) / DISK if layout.on_disk else 0.0
        return back_and_forth + moved / (HOST_LINK * 4) + swapped
    return moved / (here.bandwidth * here.bandwidth_reach)
