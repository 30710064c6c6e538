"""Measurement of the planner's rates on this machine, by a program on all ranks that `holdfast calibrate` starts.

It times every collective over groups of 2, 4, 8, ... ranks. It times products, attention and element-wise operations
while all ranks compute, and whole steps of the engine. Rank 0 writes a `planning.calibration.Calibration`. The fit
leaves out every other message size, so that those sizes can test it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
import torch.distributed as dist

from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import build_engine
from holdfast.engines.weights import SeededState
from holdfast.launch.device import join_gang, local_device
from holdfast.launch.processes import die_with_parent
from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.planning.calibration import Calibration, Machine, Point, Rates, Step, write
from holdfast.planning.hardware import Collective
from holdfast.rank.plan import device_name
from holdfast.spec import parse_spec

SIZES = {"cpu": (2**12, 2**15, 2**18, 2**20, 2**22, 2**24), "": (2**16, 2**20, 2**23, 2**25, 2**27, 2**29)}
REPEAT_BYTES = 2**25  # bytes of all messages of one size, within 5 to 40 messages
VOCABULARY = 4096
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# A model with steps below a second, and with products as large as in real models.
CPU_MODEL = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 768, "context": 256}
MODEL = {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 5632, "context": 2048}


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of the engine that are timed, of each kind")
    arguments = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    device = local_device(arguments.accelerator)
    join_gang(device, always=True)
    gang = Gang()
    rates = _rates(device, gang)
    points = list(_collectives(device, gang))
    steps = list(_steps(device, gang, arguments.accelerator, arguments.steps))
    if gang.rank == 0:
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        machine = _machine(device, arguments.accelerator, gang.size)
        calibration = Calibration(made=created, machine=machine, rates=rates, points=tuple(points), steps=tuple(steps))
        write(calibration, arguments.out)
    dist.destroy_process_group()


def _machine(device: torch.device, kind: str, ranks: int) -> Machine:
    on_host = device.type == "cpu"
    memory = _host_memory() / ranks if on_host else torch.cuda.get_device_properties(device).total_memory
    return Machine(
        device=device_name(device),
        kind=kind,
        processors=len(os.sched_getaffinity(0)),
        memory=memory,
        backend="gloo" if on_host else dist.get_backend(),
        torch=torch.__version__,
        ranks=ranks,
    )


def _host_memory() -> int:
    """The memory of this container or machine, in bytes."""
    try:
        limit = int(CGROUP_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max"
        return psutil.virtual_memory().total
    return min(limit, psutil.virtual_memory().total)


def _seconds(device: torch.device, body: Callable[[], object], count: int) -> float:
    """The median seconds of `count` calls, after two uncounted ones."""
    times = []
    for _ in range(count + 2):
        start = time.perf_counter()
        body()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _slowest(gang: Gang, seconds: float) -> float:
    return float(max(gang.all_gather(seconds, float)))


def _rates(device: torch.device, gang: Gang) -> Rates:
    """Rates of one rank while all ranks work."""
    on_cpu = device.type == "cpu"
    rows, width = (1024, 768) if on_cpu else (8192, 8192)
    rates = {}
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = (
            torch.randn(rows, width, device=device).to(kind),
            torch.randn(width, width, device=device).to(kind),
        )
        seconds = _slowest(gang, _seconds(device, lambda a=left, b=right: a @ b, 9))  # type: ignore[misc]
        rates[name] = 2 * rows * width * width / seconds
    model = CPU_MODEL if on_cpu else MODEL
    batch, heads, length = (4, model["heads"], model["context"])
    wide = model["hidden"] // heads
    kind = torch.float32 if on_cpu else torch.bfloat16
    queries = torch.randn(batch, heads, length, wide, device=device).to(kind)
    segments = Segments.of_rows(batch, length)
    seconds = _slowest(
        gang,
        _seconds(device, lambda: packed_attention(queries, queries, queries, segments), 9),
    )
    rates["attention"] = 2 * batch * heads * length * length * wide / seconds  # half of the scores are masked
    elements = 2**22 if on_cpu else 2**27
    vector, other = torch.randn(elements, device=device), torch.randn(elements, device=device)
    result = torch.empty_like(vector)
    rates["bandwidth"] = (
        12 * elements / _slowest(gang, _seconds(device, lambda: torch.mul(vector, other, out=result), 15))
    )
    little = torch.zeros(8, device=device)
    rates["kernel_seconds"] = _slowest(gang, _seconds(device, lambda: [little.add_(1) for _ in range(100)], 9)) / 100
    return Rates(**rates)


def _collectives(device: torch.device, gang: Gang) -> Iterator[Point]:
    """Every collective over each group size. All ranks create the groups. Ranks outside a group wait."""
    sizes = SIZES.get(device.type, SIZES[""])
    ranks = 2
    while ranks <= gang.size:
        group = dist.new_group(list(range(ranks)))
        for name in get_args(Collective):
            if name == "point_to_point" and ranks > 2:
                continue
            for number, size in enumerate(sizes):
                seconds = _message(device, gang, name, group, ranks, size) if gang.rank < ranks else 0.0
                yield Point(
                    collective=name,
                    ranks=ranks,
                    size=size,
                    seconds=_slowest(gang, seconds),
                    fitted=number % 2 == 0 or size == sizes[-1],
                )
        ranks *= 2


def _message(device: torch.device, gang: Gang, name: Collective, group: Any, ranks: int, size: int) -> float:
    """Seconds of one collective, as measured on this rank."""
    buffer = torch.zeros(size // 4, device=device)
    part = torch.zeros(size // 4 // ranks, device=device)
    other = torch.zeros_like(buffer)

    def there_and_back() -> None:
        for sender in (0, 1):
            if gang.rank == sender:
                dist.send(buffer, 1 - sender, group=group)
            else:
                dist.recv(buffer, sender, group=group)

    bodies: dict[Collective, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(buffer, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, buffer, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(buffer, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, buffer, group=group),
        "point_to_point": there_and_back,
    }
    count = max(5, min(40, REPEAT_BYTES // size))
    return _seconds(device, bodies[name], count) / (2 if name == "point_to_point" else 1)


def _steps(device: torch.device, gang: Gang, kind: str, count: int) -> Iterator[Step]:
    """Steps of the engine with whole replicas and with shards, with two micro-batches each."""
    on_cpu = device.type == "cpu"
    model = CPU_MODEL if on_cpu else MODEL
    precision: Literal["fp32", "bf16"] = "fp32" if on_cpu else "bf16"
    strategies: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp") if gang.size > 1 else ("ddp",)
    for strategy in strategies:
        for micro_batch in (2, 4):
            batch = 2 * micro_batch * gang.size
            fields = ", ".join(f"{name}: {value}" for name, value in model.items())
            spec = parse_spec(
                f"""
                name: calibration
                data: {{sources: [{{uri: x}}], tokenizer: {{vocabulary: {VOCABULARY}}}}}
                model: {{{fields}}}
                training: {{steps: 9, global_batch: {batch}, micro_batch: {micro_batch}, precision: {precision}}}
                parallel: {{processes: {gang.size}, strategy: {strategy}}}
                cluster: {{accelerator: {kind}, resources: {{memory: 1Ti, cpu: "1024"}}}}
                """
            )
            engine = build_engine(Assignment.of(spec, "calibration", "calibration"), VOCABULARY, 0)
            SeededState(spec.model, 0).fill(engine.boxes())  # denormal numbers would take longer
            engine.restored(0)
            rows = (torch.arange(batch // gang.size * (model["context"] + 1)) % VOCABULARY).view(batch // gang.size, -1)

            def step(engine: Any = engine, rows: torch.Tensor = rows) -> None:
                engine.step(rows, 1e-4)

            seconds = _slowest(gang, _seconds(device, step, count))
            yield Step(
                **model,
                vocabulary=VOCABULARY,
                global_batch=batch,
                micro_batch=micro_batch,
                precision=precision,
                strategy=strategy,
                seconds=seconds,
            )
            del engine


if __name__ == "__main__":
    main()
