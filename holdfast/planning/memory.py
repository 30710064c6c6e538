"""Peak memory of one rank, term by term, at the moment of a step that needs most.

The unit is bytes; `tests/planning` compares the totals with torch's counts on the meta device and in real steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.planning.activations import (
    BYTES,
    attention_backward,
    counts_as_compiled,
    layer_activations,
    tokens_of,
)
from holdfast.planning.adapters import adapter_elements, before_adapters, freed_of_experts
from holdfast.planning.answers import AnswerLot, answering
from holdfast.planning.hardware import Accelerator
from holdfast.planning.layout import Layout
from holdfast.planning.practice import Practice
from holdfast.planning.schedule import in_flight
from holdfast.planning.shape import Architecture

FRAGMENTATION = 0.05  # of temporary memory: blocks of torch's caching allocator that fit no request
SWAP_BUFFER, SWAP_GROUP = 16.0, 1e8  # bytes per element and elements in memory of a state on a disk (DeepSpeed)
LAYER_MATRICES = 3  # lower bound: no matrix of a layer exceeds this fraction of it
# Torch gives cuBLAS 32 MiB in each thread on Hopper, and with the :4096:8 that Holdfast sets: in forward and backward.
WORKSPACES = 2 * 32 * 2.0**20
IDS = 17.0  # bytes of a token's id, target and document


def offloaded(layout: Layout, accelerator: Accelerator) -> set[str]:
    """Which of weights, gradients and optimizer are outside the accelerator's memory.

    A CPU's memory is its host's, and a disk is not memory.
    """
    if accelerator.kind != "cpu":
        weights = {"weights", "gradients"} if layout.offload.startswith("parameters") else set()
        return weights | ({"optimizer"} if layout.offload != "none" else set())
    weights = {"weights"} if layout.offload == "parameters_on_disk" else set()
    return weights | ({"optimizer"} if layout.on_disk else set())


@dataclass(frozen=True)
class Memory:
    """Peak memory of one rank, in bytes."""

    terms: Mapping[str, float]
    moment: str  # of the step, at the peak
    stage: int  # of the pipeline, the one with the highest peak

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda term: self.terms[term])


def memory(
    shape: Architecture,
    layout: Layout,
    accelerator: Accelerator,
    *,
    global_batch: int,
    precision: str,
    practice: Practice,
) -> Memory:
    """The memory of the rank with the highest peak."""
    arguments = (shape, layout, accelerator, layout.micro_batches(global_batch), precision, practice)
    stages = {0, layout.pipeline - 1}
    return max((_stage(*arguments, stage) for stage in stages), key=lambda each: each.total)


def _plain_layers(shape: Architecture, layers: int, stage: int) -> int:
    """Layers of a stage without experts, although the model has some."""
    return min(layers, max(0, shape.dense_layers - stage * layers))


def stage_parameters(shape: Architecture, layout: Layout, stage: int) -> tuple[float, float, float]:
    """Elements of one rank before sharding: its layers' shared part, its experts, and the model's ends.

    Tensor parallelism does not split experts.
    """
    layers = -(-shape.layers // layout.pipeline)
    plain = _plain_layers(shape, layers, stage)
    dense, experts = layers * shape.attention_weights + plain * 3 * shape.hidden * shape.dense_ffn, 0.0
    if shape.experts > 1:
        dense += (layers - plain) * shape.shared * shape.expert_weights
        experts = (layers - plain) * shape.experts / layout.expert * shape.expert_weights
    else:
        dense += layers * shape.expert_weights
    vectors = layers * shape.vectors - plain * shape.router
    first, last = stage == 0, stage == layout.pipeline - 1
    matrices = shape.embedding * (first + last) - (shape.embedding if shape.tied and first and last else 0)
    ends = (matrices + (shape.positions if first else 0)) / layout.tensor
    return dense / layout.tensor + vectors, experts, ends + (shape.hidden if last else 0)


def _updates(practice: Practice, held: float, largest: float) -> float:
    """Bytes of all updates of a rank, with those of the largest tensor twice, and of copies of the values that they
    change.
    """
    copies = (practice.state.weights + practice.state.optimizer) * held if practice.held_back else 0.0
    return 4.0 * (held + largest) + copies


def _head(shape: Architecture, layout: Layout, precision: str, practice: Practice) -> tuple[float, float, float]:
    """Bytes of the last norm, the head and the loss: kept until the backward pass, and more in forward and backward."""
    size, tokens = BYTES[precision], tokens_of(shape, layout)
    stream = 4.0 if practice.autocast else size
    whole = tokens * layout.tensor  # every rank has all tokens, and a part of the vocabulary
    head, chunk = shape.embedding / layout.tensor, min(practice.loss_chunk, shape.context / layout.context)
    logits = chunk * shape.vocabulary / layout.tensor
    copies = 1 if practice.fused_norm or practice.lora.rank is not None else 2
    norm = shape.hidden * (stream * copies + size * (2 if practice.autocast else 1))
    kept = tokens * norm + 12.0 * whole  # with the sums of exponentials and the log-probabilities in fp32
    if practice.teacher is not None:
        kept += _taught(practice.teacher.top) * whole
    forward = logits * 8.0  # in fp32, and their exponentials
    backward = logits * (4.0 if precision == "fp32" else 4.0 + size)  # their gradient, also in 16 bits
    if counts_as_compiled(layout, practice) and practice.teacher is None:  # one kernel reads them, and writes that
        forward, backward = logits * size, logits * 2 * size
    backward += whole * shape.hidden * size  # the gradient of the head's input
    if practice.lora.rank is None:  # and of its weights; in 16 bits also of a chunk, or the sum
        backward += 4.0 * head + (head * size if precision != "fp32" else 0.0)
    return kept, forward, backward


def _frozen_models(shape: Architecture, layout: Layout, practice: Practice, stage: int) -> tuple[float, float]:
    """Elements of the reference model and the teacher on one rank before sharding, and those of their ends."""
    shapes = [shape] if practice.reference else []
    shapes += [practice.teacher.shape] if practice.teacher is not None else []
    parts = [stage_parameters(each, layout, stage) for each in shapes]
    all_elements = sum(dense + experts / layout.expert_shards(1) + ends for dense, experts, ends in parts)
    return all_elements, sum(ends for _, _, ends in parts)


def _taught(top: int) -> float:
    """Bytes of a token whose `top` likeliest tokens are learned: those tokens and the targets as integers, and what
    the divergence keeps in fp32."""
    return 8.0 * top + 8.0 * (top + 1) + 4.0 * KEPT_OF_TEACHER * top


KEPT_OF_TEACHER = 6  # values of each likeliest token: of both models, their exponentials and differences
STORED = {"fp32": 4.0, "bf16": 2.0, "nf4": 0.5 + 4 / 64}  # bytes of an element of a frozen matrix
EXPANDING = 8.0  # bytes of an element while NF4 is expanded: indices and values


class _Held(NamedTuple):
    """The parameters of a rank and what is made of them. Bytes, unless stated otherwise."""

    weights: float
    gradients: float
    optimizer: float
    trained: float  # elements, before sharding
    sharded: float  # those elements of one rank
    copies: float  # weights in 16 bits, cast once
    of_experts: float  # of these, those that a layer of experts makes itself: recomputed, they are not kept
    layer: float  # elements of a layer that are gathered, as elements of the arithmetic
    gradient: float  # elements of the largest gradient before it is scattered
    expanded: float  # a frozen matrix that is being multiplied


def _held(shape: Architecture, layout: Layout, precision: str, practice: Practice, stage: int) -> _Held:
    size, state = BYTES[precision], practice.state
    layers = -(-shape.layers // layout.pipeline)
    dense, experts, ends = stage_parameters(shape, layout, stage)
    shards = layout.shard * layout.context if layout.sharding != "none" else 1
    full, part = layout.sharding == "full", layout.sharding != "none"
    held = dense + ends + experts / layout.expert_shards(1)
    sharded = (dense + ends) / shards + experts / layout.expert_shards(shards)
    copies = size * (dense + experts + ends) if practice.autocast else 0.0
    own_copies = size * experts if practice.autocast else 0.0
    layer = (dense + experts) / layers
    if practice.lora.rank is None:
        whole = sharded if full else held
        optimizer = state.optimizer * (sharded if part else held)
        weights, gradients = state.weights * whole, state.gradients * whole
        return _Held(weights, gradients, optimizer, held, sharded, copies, own_copies, layer, max(layer, ends), 0.0)
    base, own = practice.lora.base, shards if full else 1
    plain = _plain_layers(shape, layers, stage)
    matrices = dense - layers * shape.vectors + plain * shape.router
    adapters, of_experts = adapter_elements(shape, layout, practice.lora, layers - plain, plain)
    wide = dense - matrices + ends + adapters
    sharded = adapters / shards + of_experts / layout.expert_shards(shards)
    expert_shards = layout.expert_shards(own)
    stored = STORED[base] * (matrices + experts if base == "nf4" else matrices / own + experts / expert_shards)
    gathered = 0.0 if base == "nf4" else min(1.0, STORED[base] / size)
    largest = shape.hidden * max(shape.query_width, shape.ffn) / layout.tensor
    if shape.experts > 1:  # all experts of a layer are expanded together
        largest = max(largest, shape.hidden * shape.ffn * shape.experts / layout.expert)
    expanding = {"fp32": 0.0, "bf16": size if size > STORED["bf16"] else 0.0, "nf4": EXPANDING}
    copies = size * ((matrices + experts if base == "fp32" else 0.0) + ends + adapters + of_experts)
    return _Held(
        weights=stored + state.weights * (wide / own + of_experts / expert_shards),
        gradients=state.gradients * (adapters / own + of_experts / expert_shards),
        optimizer=state.optimizer * (sharded if part else adapters + of_experts / layout.expert_shards(1)),
        trained=adapters + of_experts / layout.expert_shards(1),
        sharded=sharded,
        copies=copies if practice.autocast else 0.0,
        of_experts=size * (of_experts + experts * (base == "fp32")) if practice.autocast else 0.0,
        layer=(dense - matrices + adapters + of_experts + gathered * (matrices + experts)) / layers,
        gradient=(adapters + of_experts) / layers,
        expanded=largest * expanding[base],
    )


def _answering(
    answers: AnswerLot, shape: Architecture, accelerator: Accelerator, precision: str, practice: Practice
) -> dict[str, float]:
    """The terms of a rank that generates answers. Autocast keeps its copies in 16 bits until the last answer, and
    generation in fp32 on the CPU keeps packed matrices."""
    size = BYTES[precision]
    whole = _held(shape, Layout(), precision, replace(practice, autocast=size < 4), 0)
    copied = whole.weights if practice.whole_model else 0.0
    is_packed = accelerator.kind == "cpu" and size == 4 and shape.packable and practice.lora.rank is None
    packed = 4.0 * shape.matrices if is_packed else 0.0
    return answering(answers, shape, size, copied, whole.copies + packed)


def _working(shape: Architecture, layout: Layout, precision: str, practice: Practice, expanded: float) -> float:
    """Bytes of the backward pass of a layer on one rank, besides what its forward pass keeps."""
    size, tokens = BYTES[precision], tokens_of(shape, layout)
    stream = 4.0 if practice.autocast else size
    within = tokens * 2 * shape.ffn * shape.met * size + expanded
    within = max(within, attention_backward(shape, layout, precision, practice)) + tokens * 2 * shape.hidden * stream
    if expanded and shape.experts > 1:  # gate and up of all experts, when what they do not need is freed
        within = max(within, 2 * expanded - tokens * freed_of_experts(shape, practice.lora) * size)
    if layout.checkpointing == "none":
        return within
    everything = layer_activations(shape, layout, precision, practice, "none")
    within += everything - layer_activations(shape, layout, precision, practice)
    if layout.checkpointing != "selective" or practice.lora.rank is None:
        return within
    # While the feed-forward layer is recomputed, most kept results are still there: those of adapters are in no other
    # term. Results of norms and the gradient of the layer's result exist too.
    if shape.experts == 1:
        return max(within, tokens * (5 * shape.hidden * stream + 2 * shape.ffn * size) + expanded)
    passing = shape.hidden * (3 * stream + shape.active * size)
    adapted = shape.active * (2 * shape.hidden + 3 * shape.ffn) * size
    return max(within, tokens * passing + 2 * expanded, tokens * (passing + adapted))


def _stage(
    shape: Architecture,
    layout: Layout,
    accelerator: Accelerator,
    micro_batches: int,
    precision: str,
    practice: Practice,
    stage: int,
) -> Memory:
    size = BYTES[precision]
    layers = -(-shape.layers // layout.pipeline)
    _, experts, ends = stage_parameters(shape, layout, stage)
    shards = layout.shard * layout.context if layout.sharding != "none" else 1
    full, part = layout.sharding == "full", layout.sharding != "none"
    own_state = _held(shape, layout, precision, practice, stage)
    held, sharded, copies = own_state.trained, own_state.sharded, own_state.copies
    offloaded_parts = offloaded(layout, accelerator)
    weights, gradients, optimizer = (
        0.0 if name in offloaded_parts else bytes_of
        for name, bytes_of in zip(("weights", "gradients", "optimizer"), own_state[:3], strict=True)
    )

    kept = layer_activations(shape, layout, precision, practice)
    flight = in_flight(layout, micro_batches, stage)
    working = _working(shape, layout, precision, practice, own_state.expanded)
    ends_kept = forward = backward = 0.0
    if stage == layout.pipeline - 1:
        ends_kept, forward, backward = _head(shape, layout, precision, practice)
    ids = IDS * layout.micro_batch * shape.context * flight

    held_copies = copies if layout.checkpointing == "none" else copies / layers
    layer = own_state.layer
    gathered_layers = layers if layout.keeps_gathered else 3  # layers with whole weights on this rank
    gathered = (
        size * (ends + gathered_layers * layer) + (size + 4) * own_state.gradient
        if full and (shards > 1 or "weights" in offloaded_parts)
        else 0.0
    )
    theirs, their_ends = _frozen_models(shape, layout, practice, stage)
    weights += 4.0 * (theirs / shards if full else theirs)
    gathered += size * their_ends if full and shards > 1 else 0.0  # the ends of each model stay gathered
    if not full and layout.expert_shards(1) > 1:  # a layer's experts are gathered for the computation
        gathered = (2 * size + 4) * experts / layers

    before = gradients if micro_batches > 1 or full else 0.0
    activations = flight * layers * kept + ids
    if practice.lora.rank is not None and stage == 0 and layout.checkpointing == "none":
        stream = 4.0 if practice.autocast else size
        activations -= flight * before_adapters(shape, practice.lora, size, stream) * tokens_of(shape, layout)
    moments = {
        "loss": {
            "gradients": before,
            "activations": activations,
            "logits and loss": ends_kept + forward,
            "buffers": copies - (0.0 if layout.checkpointing == "none" else own_state.of_experts) + gathered,
        },
        "gradient of the loss": {
            "gradients": before,
            "activations": activations,
            "logits and loss": ends_kept + backward,
            "buffers": held_copies + gathered,
        },
        "backward, last layer": {
            "gradients": before,
            "activations": activations,
            "working set": working,
            "buffers": held_copies + gathered,
        },
        "backward, first layer": {
            "gradients": gradients,
            "activations": (flight - 1) * layers * kept + kept + ids,
            "working set": working,
            "buffers": copies / layers + gathered,
        },
    }
    if practice.whole_update:
        own = sharded if part else held
        largest = max(layer / LAYER_MATRICES, ends) * own / held
        moments["update"] = {"gradients": gradients, "updates": _updates(practice, own, largest)}
    if practice.answers is not None:
        moments["answers"] = _answering(practice.answers, shape, accelerator, precision, practice)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {"weights": weights, "gradients": 0.0, "optimizer": optimizer} | moments[moment]
    moving = sum(terms[name] for name in terms if name not in ("weights", "optimizer"))
    terms["left out of gradients"] = 4.0 * held if practice.left_out else 0.0
    terms["fragmentation"] = FRAGMENTATION * moving
    if layout.on_disk and accelerator.kind == "cpu":  # host memory through which groups of the state pass
        passing = min(sharded, SWAP_GROUP + max(layer, ends) / shards)
        terms["swap buffers"] = SWAP_BUFFER * passing
        if "weights" in offloaded_parts:  # weights of one written group, one read group, and its copy
            terms["swap buffers"] += size * (passing + 2 * max(layer, ends) / shards)
    terms["workspaces of products"] = WORKSPACES if accelerator.kind == "nvidia" else 0.0
    terms["driver and collectives"] = accelerator.context
    return Memory({name: value for name, value in terms.items() if value}, moment, stage)
