"""Search over the layouts of a training task: all of them by step time, and the reasons for the best one.

It tries every combination of degrees that the model, the batch and the nodes allow: first the memory, which most
exceed, then the speed. The order is always the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from holdfast.planning.hardware import Accelerator
from holdfast.planning.layout import Checkpointing, Layout, Offload, Sharding
from holdfast.planning.memory import Memory, memory
from holdfast.planning.practice import Practice, Updates, practice_here
from holdfast.planning.shape import Architecture
from holdfast.planning.speed import Speed, speed
from holdfast.spec.errors import Problem, SpecError

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LONG = 16_384  # tokens from which a sequence may be split even if the batch does not require it
MARGIN = 0.05  # share of the memory to leave free; estimates are not exact
SLOWER = 0.005  # a simpler layout is preferred if it is slower by less than this share


@dataclass(frozen=True)
class Task:
    """What to train, and on which accelerators."""

    shape: Architecture
    accelerator: Accelerator
    gpus: int
    steps: int
    global_batch: int  # sequences
    precision: str = "bf16"
    micro_batch: int | None = None  # if it is fixed
    practice: Practice | None = None  # if it differs from the engines' here
    updates: Updates = field(default_factory=Updates)
    samples: int | None = None  # sequences of all steps, if the batch grows (training.batch_ramp)

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled."""
        return self.updates.compiled

    @property
    def full_steps(self) -> float:
        """Steps of the full batch with as many sequences as all steps of the run."""
        return float(self.steps) if self.samples is None else self.samples / self.global_batch

    @property
    def tokens(self) -> float:
        """All tokens of the run."""
        return self.full_steps * self.global_batch * self.shape.context


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and its speed."""

    task: Task
    layout: Layout

    @property
    def practice(self) -> Practice:
        """How the engine computes."""
        task = self.task
        return task.practice or practice_here(task.precision, self.layout, task.accelerator.kind, task.updates)

    @cached_property
    def memory(self) -> Memory:
        """Peak memory of its fullest rank."""
        task = self.task
        return memory(
            task.shape,
            self.layout,
            task.accelerator,
            global_batch=task.global_batch,
            precision=task.precision,
            practice=self.practice,
        )

    @cached_property
    def speed(self) -> Speed:
        """The speed of a step."""
        task = self.task
        return speed(
            task.shape,
            self.layout,
            task.accelerator,
            global_batch=task.global_batch,
            precision=task.precision,
            practice=self.practice,
            compiled=task.compiled,
        )

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.memory.total <= self.task.accelerator.memory * (1 - MARGIN)

    @property
    def limit(self) -> str:
        """The limiting term of a step: matrix products, or the largest other term if it is large."""
        terms = {name: seconds for name, seconds in self.speed.terms.items() if name not in ("products", "attention")}
        worst = max(terms, key=lambda name: terms[name])
        share = terms[worst] / self.speed.seconds
        return f"{worst} {share:.0%}" if share > 0.1 else f"products {1 - sum(terms.values()) / self.speed.seconds:.0%}"

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: fast layouts first, and among equally fast ones the simplest."""
        layout = self.layout
        cuts = sum(degree > 1 for degree in (layout.tensor, layout.pipeline, layout.context, layout.expert))
        kinds = (layout.sharding != "none") + (layout.checkpointing != "none") + layout.chunks
        kinds += layout.offload != "none"
        return self.speed.seconds, 10 * cuts + kinds


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: tuple[Candidate, ...]
    today: Candidate | None  # best layout that the engines run today
    tried: int
    fitting: int
    smallest: Candidate  # needs the least memory, for when none fits


def search(
    task: Task, runs_today: Callable[[Layout], bool] = lambda _: False, count: int = 5, *, offload: bool = True
) -> Found:
    """The `count` best layouts. With `offload`, offloaded ones are tried if no other layout fits.

    Raises SpecError when the batch cannot be divided over the accelerators.
    """
    candidates = [Candidate(task, layout) for layout in layouts(task)]
    if not candidates:
        raise SpecError(
            [
                Problem(
                    "training.global_batch",
                    task.global_batch,
                    f"cannot be divided over {task.gpus} accelerators in any layout",
                    "use a multiple of a power of two, or fewer accelerators",
                )
            ]
        )
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting and offload:  # the last resort
        fitting = [option for candidate in candidates for option in _offloaded(candidate) if option.fits]
    ordered = sorted(fitting, key=lambda each: each.order)
    best = _distinct(ordered, count)
    today = next((option for option in ordered if runs_today(option.layout)), None)
    smallest = min(candidates, key=lambda each: each.memory.total)
    return Found(tuple(best), today, len(candidates), len(fitting), smallest)


def layouts(task: Task) -> Iterator[Layout]:
    """Every layout that the model, the batch and the nodes allow."""
    shape, gpus = task.shape, task.gpus
    for tensor in _divisors(min(task.accelerator.node, gpus)):
        if gpus % tensor or shape.heads % tensor or shape.kv_heads % tensor or shape.cut_ffn % tensor:
            continue
        for pipeline in _divisors(gpus // tensor):
            if pipeline > shape.layers:
                continue
            for context in (1, 2, 4, 8, 16, 32):
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or (context > 1 and not _cut_sequences(task, context, data * context)):
                    continue
                yield from _of_degrees(task, Layout(data=data, tensor=tensor, pipeline=pipeline, context=context))


def _cut_sequences(task: Task, context: int, ranks: int) -> bool:
    """Whether sequences may be split: they are long, or there are more ranks than sequences."""
    enough = task.shape.context // (2 * context) >= 512
    return enough and (task.shape.context >= LONG or ranks > task.global_batch)


def _of_degrees(task: Task, layout: Layout) -> Iterator[Layout]:
    ranks = layout.data * layout.context * layout.tensor  # ranks with different tokens
    experts = [1] if task.shape.experts == 1 else [n for n in _divisors(ranks) if task.shape.experts % n == 0]
    for expert in experts:
        for sharding, shard in _shardings(task, layout):
            if sharding == "full" and shard * layout.context * layout.tensor % expert:
                continue
            for micro_batch in (task.micro_batch,) if task.micro_batch else MICRO_BATCHES:
                micro_batches, rest = divmod(task.global_batch, layout.data * micro_batch)
                if rest or not micro_batches:
                    continue
                for checkpointing in CHECKPOINTING:
                    candidate = replace(
                        layout,
                        expert=expert,
                        sharding=sharding,
                        shard=shard,
                        micro_batch=micro_batch,
                        checkpointing=checkpointing,
                    )
                    yield from _schedules(task, candidate, micro_batches)


def _shardings(task: Task, layout: Layout) -> Iterator[tuple[Sharding, int]]:
    yield "none", 1
    if layout.data * layout.context == 1:
        return
    yield "optimizer", layout.data
    yield "full", layout.data
    ranks_in_node = task.accelerator.node // layout.tensor
    if (
        1 < ranks_in_node < layout.data
        and layout.data % ranks_in_node == 0
        and layout.pipeline == 1
        and layout.context == 1
    ):
        yield "full", ranks_in_node


def _schedules(task: Task, layout: Layout, micro_batches: int) -> Iterator[Layout]:
    yield layout
    if layout.pipeline == 1:
        return
    if _halves(task, layout, micro_batches):
        yield replace(layout, schedule="zero_bubble")
    for chunks in (2, 4):
        if micro_batches % layout.pipeline == 0 and task.shape.layers // layout.pipeline >= chunks:
            yield replace(layout, schedule="interleaved", chunks=chunks)


def _halves(task: Task, layout: Layout, micro_batches: int) -> bool:
    """Whether a backward pass can be split in two: it has one graph, keeps its activations, and fills its rounds."""
    applies = layout.tensor == 1 and layout.checkpointing == "none" and not task.compiled
    return applies and micro_batches % max(1, micro_batches // layout.pipeline) == 0


def _offloaded(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with as much in host memory as an engine can offload.

    A single whole replica becomes a shard of one. Several are skipped, because the same ranks can shard.
    """
    layout = candidate.layout
    if layout.sharding == "none":
        if layout.data * layout.context > 1:
            return
        layout = replace(layout, sharding="full", shard=1)
    offload: Offload = "parameters" if layout.sharding == "full" else "optimizer"
    yield Candidate(candidate.task, replace(layout, offload=offload))


def _distinct(ordered: list[Candidate], count: int) -> list[Candidate]:
    """The best layout of each combination of degrees; otherwise the best five would differ only in micro-batches."""
    keys: set[tuple[object, ...]] = set()
    best = []
    for candidate in ordered:
        layout = candidate.layout
        key = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.sharding, layout.shard)
        if key not in keys:
            keys.add(key)
            best.append(candidate)
        if len(best) == count:
            break
    return best


def reasons(chosen: Candidate) -> list[str]:
    """Reasons for the layout: the memory or time that its neighbors need."""
    layout, lines = chosen.layout, []
    for name, other in _neighbours(chosen):
        if other.layout.micro_batches(chosen.task.global_batch) * other.layout.data * other.layout.micro_batch != (
            chosen.task.global_batch
        ):
            continue
        if not other.fits:
            memory = other.memory
            lines.append(f"{name}: needs {memory.total / 1e9:.0f} GB, most of it {memory.largest}")
        elif other.speed.seconds > chosen.speed.seconds * (1 + SLOWER):
            slower = other.speed.seconds / chosen.speed.seconds - 1
            lines.append(f"{name}: {slower:.0%} slower, {other.limit}")
    if layout.checkpointing == "none":
        lines.append("no checkpointing of activations: they fit")
    return lines


def _neighbours(chosen: Candidate) -> Iterator[tuple[str, Candidate]]:
    layout, task = chosen.layout, chosen.task

    def with_(**changes: object) -> Candidate:
        changed = replace(layout, **changes)  # type: ignore[arg-type]
        if changed.sharding != "none" and layout.shard == layout.data:
            changed = replace(changed, shard=changed.data)
        return Candidate(task, changed)

    if layout.tensor > 1:
        yield f"tensor {layout.tensor // 2}", with_(tensor=layout.tensor // 2, data=layout.data * 2)
    elif layout.data % 2 == 0 and task.accelerator.node > 1 and not task.shape.kv_heads % 2:
        yield "tensor 2", with_(tensor=2, data=layout.data // 2)
    if layout.pipeline > 1 and layout.pipeline % 2 == 0:
        yield f"pipeline {layout.pipeline // 2}", with_(pipeline=layout.pipeline // 2, data=layout.data * 2)
    elif layout.data % 2 == 0 and task.shape.layers > 1 and layout.pipeline == 1:
        yield "pipeline 2", with_(pipeline=2, data=layout.data // 2)
    yield f"micro-batch {layout.micro_batch * 2}", with_(micro_batch=layout.micro_batch * 2)
    if layout.checkpointing != "none":
        less = CHECKPOINTING[CHECKPOINTING.index(layout.checkpointing) - 1]
        yield f"checkpointing {less}", with_(checkpointing=less)
    if layout.sharding != "none":
        yield "whole replicas (ddp)", with_(sharding="none", shard=1, offload="none")
    elif layout.data > 1:
        yield "sharded (fsdp)", Candidate(task, replace(layout, sharding="full", shard=layout.data))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
