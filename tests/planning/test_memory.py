"""The planner's memory compared with torch: parameters on the meta device, and every byte in real steps."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks._living import Living
from holdfast.corpus.starting_model import teacher_of
from holdfast.engines.assignment import Assignment
from holdfast.engines.torch.engine import TorchEngine
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import parameter_count
from holdfast.model.lora import adapter_shapes
from holdfast.planning import (
    ACCELERATORS,
    Accelerator,
    Architecture,
    Candidate,
    Layout,
    Task,
    Updates,
    memory,
    practice_here,
)
from holdfast.planning.activations import layer_activations
from holdfast.planning.auto import fields_of, layout_of, task_of, with_fields
from holdfast.planning.memory import Memory
from holdfast.planning.practice import PAPER
from holdfast.spec import Spec, parse_spec
from holdfast.spec.model import Model
from holdfast.spec.rules.objective import objective_name
from holdfast.spec.training import KEEPING, Lora
from tests.model.tiny_model import decoder, export, shape
from tests.planning.answering import answering_spec, peak_of_answers

VOCABULARY = 256
BAR = 0.05  # S1
HERE = Accelerator(
    name="here", kind="cpu", bf16=1e11, fp32=1e11, memory=1e10, bandwidth=1e10, node=1, link=1e9, network=1e9, watts=0,
    context=0,
)  # fmt: skip
LLAMA_8B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, context=8192, tie_embeddings=False, rope_theta=5e5
)


def spec_of(layers: int = 4, micro_batch: int = 4, tied: bool = True, **training: str) -> Spec:
    masks, context = training.pop("masks", "false"), training.pop("context", "128")
    hidden = training.pop("hidden", "96")
    start = ", init_from: x" if "lora" in training else ""
    shape = f"layers: {layers}, hidden: {hidden}, heads: 6, kv_heads: 2, context: {context}"
    model = f"{shape}, tie_embeddings: {str(tied).lower()}"
    lines = "".join(f", {name}: {value}" for name, value in training.items())
    return parse_spec(
        f"""
        name: a
        store: s3://bucket/prefix
        data: {{sources: [{{uri: x}}], document_masks: {masks}}}
        model: {{{model}{start}}}
        training: {{steps: 3, global_batch: 8, micro_batch: {micro_batch}{lines}}}
        """
    )


def planned(spec: Spec, vocabulary: int) -> Memory:
    layout = Layout(micro_batch=spec.training.micro_batch, checkpointing=spec.training.activation_checkpointing)
    teacher = teacher_of(spec)
    guide = None if teacher is None else Architecture.of(teacher, vocabulary)
    updates = Updates.of(spec.training, objective_name(spec), guide)
    practice = practice_here(spec.training.precision, layout, "cpu", updates)
    return memory(
        Architecture.of(spec.model, vocabulary), layout, HERE, global_batch=spec.training.global_batch,
        precision=spec.training.precision, practice=practice,
    )  # fmt: skip


def measured(spec: Spec, vocabulary: int) -> int:
    """The peak of bytes in live tensors during a step of the real engine, with its state."""
    engine = TorchEngine(Assignment.of(spec, "run", "dataset"), vocabulary, 3)
    rows = torch.arange(spec.training.global_batch * (spec.model.context + 1)) % vocabulary
    state = [box.data for box in engine.boxes()]
    models = (*engine._parts, *engine._frozen.reference, *engine._frozen.teacher)
    frozen = [each for part in models for each in (*part.parameters(), *part.buffers())]
    state += [each.data for each in frozen if not each.requires_grad and each.shape[0] != spec.model.context]
    is_bad = (lambda loss, *_: loss.isinf()) if spec.training.anomalies.action != "stop" else None
    with Living(state) as live_tensors:
        engine.step(rows.view(spec.training.global_batch, -1), 1e-3, judge=is_bad)
    return live_tensors.peak


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_memory_of_a_real_step_is_within_five_percent(checkpointing: str, precision: str) -> None:
    spec = spec_of(precision=precision, activation_checkpointing=checkpointing)
    memory = planned(spec, VOCABULARY)
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, VOCABULARY), rel=BAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "precision", "checkpointing"),
    [("fp32", "fp32", "none"), ("bf16", "fp32", "full"), ("bf16", "bf16", "none"), ("nf4", "fp32", "none")],
)
def test_the_memory_of_a_real_step_of_adapters_is_within_five_percent(
    base: str, precision: str, checkpointing: str
) -> None:
    lora = f"{{rank: 8, base: {base}}}"
    # NF4 scales 64 columns together.
    hidden, context, vocabulary = ("192", "64", 512) if base == "nf4" else ("96", "32", VOCABULARY)
    spec = spec_of(
        8, 1, precision=precision, activation_checkpointing=checkpointing, lora=lora, context=context, hidden=hidden
    )
    memory = planned(spec, vocabulary)
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, vocabulary), rel=BAR)


MIXTRAL, SHARED = "mixtral, experts: 4", "qwen2_moe, experts: 8, routing: {shared: 1}"
ALL = ", ".join(Lora().targets)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("base", "precision", "family", "targets"),
    [
        ("fp32", "fp32", MIXTRAL, ALL),
        ("bf16", "bf16", MIXTRAL, ALL),
        ("bf16", "fp32", SHARED, ALL),
        ("nf4", "fp32", MIXTRAL, ALL),
        ("bf16", "bf16", MIXTRAL, "q_proj"),
        ("nf4", "fp32", MIXTRAL, "q_proj"),
        ("bf16", "bf16", SHARED, "q_proj, v_proj"),
        ("nf4", "fp32", MIXTRAL, "o_proj"),
        ("bf16", "bf16", SHARED, "gate_proj, up_proj"),
        ("fp32", "fp32", MIXTRAL, "down_proj"),
        ("bf16", "bf16", "llama", ALL),
        ("bf16", "bf16", "llama", "o_proj"),
        ("nf4", "fp32", "llama", "q_proj, v_proj"),
        ("bf16", "bf16", "llama", "down_proj"),
    ],
)
def test_the_memory_of_a_real_step_of_adapted_matrices_is_within_five_percent(
    base: str, precision: str, family: str, targets: str, checkpointing: str
) -> None:
    lora = f"{{rank: 8, base: {base}, targets: [{targets}]}}, activation_checkpointing: {checkpointing}"
    spec = parse_spec(
        f"""
        name: a
        store: s3://bucket/prefix
        data: {{sources: [{{uri: x}}]}}
        model: {{layers: 4, hidden: 192, heads: 6, kv_heads: 2, context: 128, ffn: 256, init_from: x, family: {family}}}
        training: {{steps: 3, global_batch: 8, micro_batch: 1, precision: {precision}, lora: {lora}}}
        """
    )
    memory = planned(spec, 512)
    adapters = adapter_shapes(spec.model, 512, spec.training.lora).values()
    assert memory.terms["gradients"] == 4 * sum(map(math.prod, adapters))
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, 512), rel=BAR)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(("family", "precision"), [(MIXTRAL, "bf16"), (SHARED, "bf16"), (SHARED, "fp32")])
def test_the_memory_of_a_real_step_of_recomputed_experts_is_within_five_percent(
    family: str, precision: str, checkpointing: str
) -> None:
    spec = parse_spec(
        f"""
        name: a
        store: s3://bucket/prefix
        data: {{sources: [{{uri: x}}]}}
        model: {{layers: 4, hidden: 192, heads: 6, kv_heads: 2, context: 128, ffn: 256, family: {family}}}
        training: {{steps: 3, global_batch: 8, micro_batch: 1, precision: {precision},
          activation_checkpointing: {checkpointing}}}
        """
    )
    memory = planned(spec, 512)
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, 512), rel=BAR)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_of_a_real_step_of_preferences_has_the_reference_model(precision: str) -> None:
    spec = parse_spec(
        f"""
        name: a
        store: s3://bucket/prefix
        data:
          kind: preferences
          document_masks: true
          sources: [{{uri: x}}]
          tokenizer: {{kind: file, path: x, end_of_text: x}}
        model: {{layers: 8, hidden: 96, heads: 6, kv_heads: 2, context: 32, init_from: x}}
        training: {{steps: 3, global_batch: 8, micro_batch: 2, precision: {precision}}}
        """
    )
    memory = planned(spec, VOCABULARY)
    assert memory.terms["weights"] == 2 * 4 * parameter_count(spec.model, VOCABULARY)
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, VOCABULARY), rel=BAR)


@pytest.mark.parametrize("top", [8, 64])
def test_the_memory_of_a_real_step_of_a_distillation_has_the_teacher(tmp_path: Path, top: int) -> None:
    guide = shape(layers=4, hidden=128, heads=4, context=32)
    export(tmp_path, decoder(guide, VOCABULARY))
    spec = parse_spec(
        f"""
        name: a
        store: s3://bucket/prefix
        data: {{sources: [{{uri: x}}]}}
        model: {{layers: 8, hidden: 96, heads: 6, kv_heads: 2, context: 32}}
        training:
          {{steps: 3, global_batch: 8, micro_batch: 2, objective: distillation,
           distillation: {{teacher: "{tmp_path}", top_k: {top}}}}}
        """
    )
    memory = planned(spec, VOCABULARY)
    weights = parameter_count(spec.model, VOCABULARY) + parameter_count(guide, VOCABULARY)
    assert memory.terms["weights"] == 4 * weights
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, VOCABULARY), rel=BAR)


@pytest.mark.parametrize("anomalies", ["{action: stop}", "{action: skip}"], ids=["applied", "may be held back"])
@pytest.mark.parametrize(
    ("vocabulary", "layers"), [(256, 4), (2048, 8), (4096, 4)], ids=["a small vocabulary", "many layers", "a large one"]
)
def test_the_memory_estimate_of_a_lamb_step_includes_all_updates(vocabulary: int, layers: int, anomalies: str) -> None:
    spec = spec_of(layers, 1, context="16", optimizer="{kind: lamb}", anomalies=anomalies)
    memory = planned(spec, vocabulary)
    assert memory.moment == "update"
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, vocabulary), rel=BAR)


@pytest.mark.parametrize("kind", KEEPING)
def test_the_compression_residual_is_in_the_memory_of_every_full_replica(kind: str) -> None:
    """`tests/train/test_compression.py` says what this is: an fp32 copy of each gradient."""
    spec = spec_of(gradient_compression=kind)
    task = task_of(spec, ACCELERATORS["H100"], 4, VOCABULARY)
    replicas = Candidate(task, Layout(data=4)).memory.terms
    assert replicas["left out of gradients"] == replicas["gradients"] == 4 * task.shape.parameters
    for other in (Layout(data=4, shard=4, sharding="full"), Layout(data=4, shard=4, sharding="optimizer"), Layout()):
        assert "left out of gradients" not in Candidate(task, other).memory.terms


@pytest.mark.parametrize(
    ("layers", "micro_batch", "vocabulary", "masks", "tied"),
    [(4, 4, 2048, "false", False), (4, 4, 256, "true", True), (8, 8, 256, "false", True)],
    ids=["a large vocabulary", "masks of documents", "no accumulation"],
)
def test_the_memory_estimate_matches_other_shapes(
    layers: int, micro_batch: int, vocabulary: int, masks: str, tied: bool
) -> None:
    spec = spec_of(layers, micro_batch, tied, masks=masks)
    memory = planned(spec, vocabulary)
    estimate = memory.total - memory.terms["fragmentation"]
    assert estimate == pytest.approx(measured(spec, vocabulary), rel=BAR)


def test_activation_memory_matches_autograd_to_one_in_ten_thousand() -> None:
    """The difference that two more layers make, measured by the hooks through which autograd saves."""

    def saved(layers: int) -> int:
        spec = spec_of(layers)
        decoder = Decoder.empty(spec.model, VOCABULARY)
        for parameter in decoder.parameters():
            torch.nn.init.zeros_(parameter)
        weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = 0 if storage._cdata in weights else storage.nbytes()
            return tensor

        rows = torch.arange(4 * 129).view(4, -1) % VOCABULARY
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = decoder(rows[:, :-1], rows[:, 1:])
        total = sum(sizes.values())
        del loss
        return total

    layout = Layout(micro_batch=4)
    kept_bytes = layer_activations(
        Architecture.of(spec_of().model, VOCABULARY), layout, "fp32", practice_here("fp32", layout, "cpu")
    )
    assert kept_bytes == pytest.approx((saved(4) - saved(2)) / 2, rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_torch_does_on_the_meta_device(tied: bool) -> None:
    model = LLAMA_8B.model_copy(update={"tie_embeddings": tied})
    shape = Architecture.of(model, 128_256)
    assert shape.parameters == parameter_count(model, 128_256)
    layout = Layout(data=8, shard=8, sharding="full")
    terms = memory(
        shape, layout, HERE, global_batch=8, precision="bf16", practice=practice_here("bf16", layout, "cpu")
    ).terms
    state = terms["weights"] + terms["gradients"] + terms["optimizer"]
    assert state == pytest.approx(16 * shape.parameters / 8, rel=1e-6)


def test_the_activations_of_a_gpt_layer_are_those_of_korthikanti() -> None:
    """s b h (34 + 5 a s / h) / t bytes; selective recomputation drops the last term, full recomputation keeps 2 s b
    h."""
    gpt3 = Architecture(96, 12288, 96, 96, 4 * 12288, 2048, 51200, tied=True, gated=False, biased=True, dropout=True)
    unit = 2048 * 12288 / 8
    activations = [
        layer_activations(gpt3, Layout(tensor=8), "bf16", PAPER, kind) for kind in ("none", "selective", "full")
    ]
    assert activations == pytest.approx([unit * (34 + 80), unit * 34, unit * 2], rel=1e-3)


def test_offloaded_state_uses_host_memory_and_no_accelerator_memory() -> None:
    spec = parse_spec(
        """
        name: a
        store: s3://bucket/prefix
        data: {sources: [{uri: x}]}
        model: {layers: 4, hidden: 192, heads: 6, context: 256}
        training: {global_batch: 8, micro_batch: 2}
        parallel: {processes: 4, strategy: zero3, offload: parameters}
        """
    )
    full_layout = layout_of(spec)
    task = Task(Architecture.of(spec.model, VOCABULARY), ACCELERATORS["H100"], 4, 1, 8, precision="fp32")
    assert layout_of(with_fields(spec, fields_of(task, full_layout) | {"parallel.strategy": "zero3"})) == full_layout

    def needed(kind: str, offload: str) -> Memory:
        host = HERE.model_copy(update={"kind": kind})
        return Candidate(replace(task, accelerator=host), full_layout.with_(offload=offload)).memory

    state = {"weights", "optimizer"}
    assert needed("nvidia", "none").terms.keys() >= state
    assert needed("nvidia", "optimizer").terms.keys() & state == {"weights"}
    assert needed("nvidia", "parameters").terms.keys() & state == set()
    freed = needed("nvidia", "none").total - needed("nvidia", "parameters").total
    assert freed >= 12 * parameter_count(spec.model, VOCABULARY) / 4
    assert needed("cpu", "parameters").total == needed("cpu", "none").total
    on_disk = layout_of(spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"offload_path": "/x"})}))
    swapped_candidate = Candidate(replace(task, accelerator=HERE.model_copy(update={"kind": "cpu"})), on_disk)
    assert swapped_candidate.memory.terms.keys() & {*state, "swap buffers"} == {"weights", "swap buffers"}
    assert swapped_candidate.memory.terms["swap buffers"] == 16 * parameter_count(spec.model, VOCABULARY) / 4
    assert swapped_candidate.speed.seconds > Candidate(swapped_candidate.task, full_layout).speed.seconds
    weights = Candidate(swapped_candidate.task, on_disk.with_(offload="parameters_on_disk"))
    terms, before = weights.memory.terms, swapped_candidate.memory.terms
    assert terms.keys() & state == set() and terms["gradients"] == before["gradients"]
    assert terms["swap buffers"] - before["swap buffers"] >= before["weights"]  # a model of one group moves as a whole
    assert weights.speed.seconds > swapped_candidate.speed.seconds

    def step(kind: str, offload: str) -> float:
        host = HERE.model_copy(update={"kind": kind})
        return Candidate(replace(task, accelerator=host), full_layout.with_(offload=offload)).speed.seconds

    assert step("cpu", "parameters") == step("cpu", "optimizer") == step("cpu", "none")
    assert len({step("nvidia", offload) for offload in ("none", "optimizer", "parameters")}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "vocabulary"),
    [
        ((), VOCABULARY),
        (("training.precision=bf16",), VOCABULARY),
        (("training.grpo.answer_tokens=8", "model.heads=2", "model.kv_heads=2", "model.layers=2"), VOCABULARY),
        (("model.layers=2",), 8192),
        (("training.lora.rank=8", "training.lora.base=bf16", "training.precision=bf16"), VOCABULARY),
    ],
    ids=["caches", "bf16", "prompts", "a large vocabulary", "adapters"],
)
def test_the_memory_of_generated_answers_is_within_five_percent(overrides: tuple[str, ...], vocabulary: int) -> None:
    spec = answering_spec(*overrides)
    memory = planned(spec, vocabulary)
    assert memory.moment == "answers"
    estimate = memory.total - memory.terms["fragmentation"]
    engine = TorchEngine(Assignment.of(spec, "run", "dataset"), vocabulary, 3)
    peak = peak_of_answers(engine, spec.model, spec.training.grpo, vocabulary)
    assert estimate == pytest.approx(peak, rel=BAR)


def test_a_server_answers_without_caches() -> None:
    server = "training.grpo.server={software: x, url: 'http://h/v1', weights: w}"
    fields, generated = ("parallel.processes=2", "parallel.tensor=2", "training.precision=bf16"), set()
    for more in ((server,), ()):
        spec = answering_spec(*fields, *more)
        needed = Candidate(task_of(spec, ACCELERATORS["H100"], 2, VOCABULARY), layout_of(spec)).memory
        assert needed.moment == "answers"
        assert needed.terms["whole model"] == 4 * parameter_count(spec.model, VOCABULARY)
        found = needed.terms.keys() & {"caches of answers", "working set", "buffers"}
        generated.add((bool(more), len(found)))
    assert generated == {(True, 0), (False, 3)}
