"""One accelerator: exactness, kernels, memory against the plan, MFU, recovery, save stall and health, in one run.

`python -m benchmarks.accelerator [--seconds N] [--only exactness,mfu] [--out FOLDER] [--tiny]` needs a CUDA device and
no network. Every measurement is a process with a time limit: a fork of this one, which has imported everything and
never uses the device. Each writes what it has after each part, and `accelerator.json` is rewritten after each
measurement, so a run that is cut keeps its figures. A failure is recorded with its output and the next measurement
starts. `accelerator.md` is the report. `--tiny` uses small shapes, on the CPU if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.launch.device import MEETING_VARIABLE, device_name, join_gang, local_device

SECTIONS = ("exactness", "kernels", "memory", "mfu", "recovery", "stall", "health")
SECONDS = {"train": 100.0, "stall": 100.0, "mfu": 120.0}  # the longest time of one measurement
DEFAULT_SECONDS = 60.0
EXACT_STEPS, SAVE_EVERY, KILL_AFTER = 12, 3, 7
TAIL = 4000  # characters of a failed measurement's output that are kept
END_OF_TEXT = 0
MODULES = (  # imported before the forks
    "benchmarks._living", "blake3", "holdfast.checkpoint", "holdfast.engines.torch.engine", "holdfast.engines.weights",
    "holdfast.health.examine", "holdfast.planning", "holdfast.rank.measure.throughput", "holdfast.store",
    "torch.distributed.checkpoint", "torch.profiler",
)  # fmt: skip
NOTES = {
    "exactness": "A run without interruption, and one that is killed (SIGKILL) after a step and resumed: bf16, exact, "
    "with a process group of one rank. Both must end with the same BLAKE3 digest of weights and moments.",
    "kernels": "One profiled step in bf16, exact, with and without document masks: torch's attention operations and "
    "the kernels on the device. `math` is torch's attention without a fused kernel.",
    "memory": "Peak of one step. `planned` is the plan without fragmentation, driver and collectives, beside torch's "
    "allocated peak. `planned_whole` includes them, beside all memory in use on the device.",
    "mfu": "`off` and `exact` are Holdfast's engine at these levels of `training.determinism`. `bare` is a plain torch "
    "loop: same decoder, micro-batches, bf16 autocast, gradient clipping and fused AdamW. `-compiled`: torch.compile; "
    "Holdfast compiles each layer, the bare loop the whole model. FLOPs of a token: 6 N + 12 L D T.",
    "recovery": "From SIGKILL of the process to the end of the first step of a new one, which starts Python, imports, "
    "and loads the checkpoint.",
    "stall": "A save of weights and moments to a store in a folder. `host_stall_s`: the training thread waits in "
    "Holdfast. `slower_s`: the save and the next steps, minus the time of these steps alone. The first save also "
    "allocates and pins its buffer. `torch_save_s` and the call of `dcp_async_save` stop training for all their time.",
    "health": "The health check of a run (`holdfast health`) on this rank.",
}


@dataclass(frozen=True)
class Request:
    """What one measurement process does."""

    measure: str
    accelerator: str
    tiny: bool
    steps: int
    result: str = ""
    seconds: float = 0.0  # its time limit
    variant: str = ""
    store: str = ""
    run_id: str = ""
    launch: int = 1
    kill: bool = False
    fresh: bool = False  # starts a new Python process

    def write(self, found: dict[str, Any]) -> None:
        """Write what was found so far."""
        partial = Path(self.result).with_suffix(".part")
        partial.write_text(json.dumps(found))
        partial.replace(self.result)


def shapes(size: str) -> tuple[dict[str, int], int, int, int]:
    """Model, vocabulary, micro-batch and global batch of a size."""
    if size == "tiny":
        return {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "context": 64}, 256, 2, 4
    if size == "small":
        return {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "context": 512}, 4096, 4, 8
    return {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5504, "context": 2048}, 32768, 4, 16


def spec_for(size: str, accelerator: str, **training: object) -> Any:
    """The spec of a size; `masks` keeps attention inside documents."""
    from holdfast.spec import parse_spec

    model, _, micro, global_batch = shapes(size)
    masks = bool(training.pop("masks", False))
    document = {
        "name": "accelerator",
        "data": {"sources": [{"uri": "none"}], "document_masks": masks},
        "model": model,
        "training": {"steps": 100, "global_batch": global_batch, "micro_batch": micro, **training},
        "parallel": {"processes": 1},
        "cluster": {"accelerator": accelerator},
    }
    return parse_spec(json.dumps(document), [])


def engine_for(spec: Any, vocabulary: int) -> Any:
    """The engine of a spec, with its determinism set."""
    from holdfast.engines.assignment import Assignment
    from holdfast.engines.interface import build_engine
    from holdfast.rank.randomness import make_deterministic

    make_deterministic(spec.training.determinism, torch.get_num_threads())
    return build_engine(Assignment.of(spec, "accelerator", "none"), vocabulary, END_OF_TEXT)


def fill(state: Any) -> None:
    """Random matrices and norms of one, made on the device, in the weights of an engine or a module."""
    torch.manual_seed(0)
    weights = state.parameters() if isinstance(state, torch.nn.Module) else _weights(state)
    with torch.no_grad():
        for weight in weights:
            weight.normal_(0.0, 0.02) if weight.dim() > 1 else weight.fill_(1.0)


def _weights(engine: Any) -> list[torch.Tensor]:
    """The weights among an engine's boxes, which are views of its state."""
    from holdfast.engines.weights import MOMENTS

    return [box.data for box in engine.boxes() if not box.name.startswith(tuple(MOMENTS.values()))]


def rows_for(step: int, count: int, context: int, vocabulary: int) -> torch.Tensor:
    """The batch of a step, a pure function of the step."""
    noise = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (count, context + 1), generator=noise)


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def digest(boxes: Iterable[Any]) -> str:
    """BLAKE3 of names and bytes of the state."""
    from blake3 import blake3

    hasher = blake3()
    for box in sorted(boxes, key=lambda each: each.name):
        hasher.update(box.name.encode())
        hasher.update(box.data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def train_exactly(request: Request) -> None:
    """Train to the last step with saves, from the newest checkpoint; ends by SIGKILL after a step if `kill`."""
    from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.collectives import Gang
    from holdfast.engines.weights import SeededState
    from holdfast.store import open_store

    size = "tiny" if request.tiny else "small"
    model, vocabulary, _, global_batch = shapes(size)
    spec = spec_for(size, request.accelerator, determinism="exact", precision="bf16")
    device, times = local_device(request.accelerator), {"start": time.time()}
    join_gang(device, always=True)
    gang, store = Gang(), open_store(request.store)
    engine = engine_for(spec, vocabulary)
    attempt = claim_attempt(store, request.run_id, launch=request.launch)
    saver = Checkpointer(
        store, attempt, Retention(2), describe={"dataset_id": "none", "layout": engine.layout, "random": {}}, gang=gang,
        options=SaveOptions(max_lag_steps=SAVE_EVERY),
    )  # fmt: skip
    times["engine"] = time.time()
    began = saver.restore(engine.boxes(), SeededState(spec.model, 0).fill)
    engine.restored(began)
    times["state"] = time.time()
    losses = []
    for step in range(began + 1, EXACT_STEPS + 1):
        out = engine.step(rows_for(step, global_batch, model["context"], vocabulary), 1e-3, saver.wait_for_staging)
        losses.append(out.loss.item())
        times.setdefault("first_step", time.time())
        if request.kill and step == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % SAVE_EVERY == 0:
            saver.save(step, engine.saved(), engine.scalars(step))
            if request.kill:
                saver.wait()  # a checkpoint exists when the process dies
    saver.wait()
    reduced = torch.arange(1 << 20, device=device, dtype=torch.float32) / 3
    before = reduced.clone()
    dist.all_reduce(reduced)
    settle(device)
    request.write(
        {
            "from_step": began, "digest": digest(engine.boxes()), "last_loss": losses[-1], "times": times,
            "backend": dist.get_backend(), "all_reduce_same_bits": bool(torch.equal(before, reduced)),
        }
    )  # fmt: skip
    saver.close()
    dist.destroy_process_group()


def kernels(request: Request) -> None:
    """Which attention and which kernels one bf16 step runs, with and without document masks."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    size, device, results = "tiny" if request.tiny else "small", local_device(request.accelerator), {}
    model, vocabulary, _, global_batch = shapes(size)
    for masks in (False, True):
        spec = spec_for(size, request.accelerator, determinism="exact", precision="bf16", masks=masks)
        engine = engine_for(spec, vocabulary)
        fill(engine)
        rows = rows_for(1, global_batch, model["context"], vocabulary)
        engine.step(rows, 1e-3)
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
            engine.step(rows, 1e-3)
            settle(device)
        events = profiler.key_averages()
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        on_device.sort(key=lambda event: -event.self_device_time_total)
        operations = sorted({e.key for e in events if "dot_product" in e.key or "_attention" in e.key})
        results["document masks" if masks else "plain"] = {
            "attention": operations,
            "attention_kernels": [
                event.key[:200] for event in on_device
                if any(part in event.key.lower() for part in ("flash", "fmha", "attention", "sdpa"))
            ],
            "math": any("attention_math" in name for name in operations),
            "top": [
                [event.key[:160], round(event.self_device_time_total / 1e3, 3), event.count]
                for event in on_device[:20]
            ],
        }  # fmt: skip
        request.write(results)


def planned_bytes(spec: Any, vocabulary: int, device: torch.device) -> dict[str, float]:
    """The planner's terms for one rank."""
    from holdfast.planning import ACCELERATORS
    from holdfast.planning.hardware import by_device
    from holdfast.planning.layout import Layout
    from holdfast.planning.memory import Updates, memory, practice_here
    from holdfast.planning.shape import Architecture

    kind = "nvidia" if device.type == "cuda" else "cpu"
    layout = Layout(micro_batch=spec.training.micro_batch, checkpointing=spec.training.activation_checkpointing)
    practice = practice_here(spec.training.precision, layout, kind, spec.data.document_masks, Updates.of(spec.training))
    return dict(
        memory(
            Architecture.of(spec.model, vocabulary), layout, by_device(device_name(device)) or ACCELERATORS["H100"],
            global_batch=spec.training.global_batch, precision=spec.training.precision, practice=practice,
        ).terms
    )  # fmt: skip


def memory_of(request: Request) -> None:
    """Peak bytes of a step against the plan, for several shapes."""
    from benchmarks._living import Living

    device, results = local_device(request.accelerator), {}
    cases = [("small", "none"), ("small", "selective"), ("small", "full"), ("large", "none")]
    for size, checkpointing in [("tiny", "none"), ("tiny", "full")] if request.tiny else cases:
        model, vocabulary, _, global_batch = shapes(size)
        spec = spec_for(size, request.accelerator, precision="bf16", activation_checkpointing=checkpointing)
        terms = planned_bytes(spec, vocabulary, device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        engine = engine_for(spec, vocabulary)
        fill(engine)
        rows = rows_for(1, global_batch, model["context"], vocabulary)
        if cuda:
            engine.step(rows, 1e-4)
            settle(device)
            free, total = torch.cuda.mem_get_info(device)
            peak, extra = torch.cuda.max_memory_allocated(), {
                "before": before, "reserved": torch.cuda.max_memory_reserved(), "device_in_use": total - free,
            }  # fmt: skip
        else:
            with Living([box.data for box in engine.boxes()]) as living:
                engine.step(rows, 1e-4)
            peak, extra = living.peak, {}
        plan = sum(size for name, size in terms.items() if name != "fragmentation" and "driver" not in name)
        results[f"{size} {checkpointing}"] = {
            "peak": peak, "planned": plan, "planned_over_peak": plan / peak, "planned_whole": sum(terms.values()),
            **extra, "terms": terms,
        }  # fmt: skip
        request.write(results)
        del engine
        gc.collect()


def mfu(request: Request) -> None:
    """Seconds of a step and MFU of one variant: `bare`, `off` or `exact`, and `-compiled`."""
    from holdfast.engines.assignment import Assignment
    from holdfast.rank.measure.throughput import Throughput

    size = "tiny" if request.tiny else "large"
    model, vocabulary, micro, global_batch = shapes(size)
    level, _, compiled = request.variant.partition("-")
    device = local_device(request.accelerator)
    training = {"determinism": "exact" if level == "exact" else "off", "precision": "bf16", "compile": bool(compiled)}
    spec = spec_for(size, request.accelerator, **training)
    began = time.perf_counter()
    step: Callable[[torch.Tensor], object]
    if level == "bare":
        step = bare_step(spec, vocabulary, device, micro, bool(compiled))
    else:
        engine = engine_for(spec, vocabulary)
        fill(engine)
        step = lambda rows: engine.step(rows, 1e-4)  # noqa: E731
    batches = [rows_for(number, global_batch, model["context"], vocabulary) for number in range(request.steps + 2)]
    for rows in batches[:2]:
        step(rows)
    settle(device)
    work = Throughput.of(Assignment.of(spec, "accelerator", "none"), vocabulary, 1, device_name(device))
    built, times = time.perf_counter() - began, list[float]()
    for rows in batches[2:]:
        start = time.perf_counter()
        step(rows)
        settle(device)
        times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        request.write(
            {
                "step_s": seconds, "worst_s": max(times), "tokens_per_s": work.tokens / seconds,
                "mfu": work.mfu(seconds), "tflops": work.flops / seconds / 1e12, "build_s": built,
                "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, "steps": len(times),
            }
        )  # fmt: skip


def bare_step(spec: Any, vocabulary: int, device: torch.device, micro: int, compiled: bool) -> Any:
    """A bare torch loop over the same model: autocast, clip, fused AdamW."""
    from holdfast.engines.torch.optimizers import decay_groups
    from holdfast.model.decoder import Decoder

    torch.backends.cuda.matmul.allow_tf32 = True
    with device:
        model = Decoder(spec.model, vocabulary)
    fill(model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)
    computing = torch.compile(model) if compiled else model

    def step(rows: torch.Tensor) -> None:
        parts = rows.to(device).split(micro)
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16):
                loss = computing(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def stall(request: Request) -> None:
    """The cost of a save for training, compared with `torch.save` and DCP's async_save; and copies from the device."""
    from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.store import open_store

    ends = time.perf_counter() + request.seconds
    size, device = "tiny" if request.tiny else "large", local_device(request.accelerator)
    results: dict[str, Any] = {"copies": copy_rates(device, 2**20 if request.tiny else 2**30)}
    request.write(results)
    model, vocabulary, _, global_batch = shapes(size)
    engine = engine_for(spec_for(size, request.accelerator, precision="bf16"), vocabulary)
    fill(engine)
    folder, store = Path(request.store), open_store(f"file://{request.store}/store")
    saver = Checkpointer(
        store, claim_attempt(store, "stall", launch=1), Retention(1), options=SaveOptions(max_lag_steps=1000),
        describe={"dataset_id": "none", "layout": engine.layout, "random": {}},
    )  # fmt: skip
    done, following = 0, 4  # steps after a save that are compared with steps without

    def steps(count: int) -> float:
        nonlocal done
        start = time.perf_counter()
        for _ in range(count):
            done += 1
            engine.step(rows_for(done, global_batch, model["context"], vocabulary), 1e-4, saver.wait_for_staging)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not the stream of a copy
        return time.perf_counter() - start

    steps(2)
    calm = steps(following)
    state = engine.saved()
    state_bytes = sum(box.data.numel() * box.data.element_size() for box in state)
    results |= {"state_bytes": state_bytes, "step_s": calm / following, "saves": []}
    for number in range(3):
        if number and time.perf_counter() + 1.5 * results["saves"][-1]["commit_s"] > ends - 10:
            break
        before, start = saver.stall_seconds, time.perf_counter()
        saver.save(done, engine.saved(), engine.scalars(done))
        steps(following)
        took = time.perf_counter() - start
        waited = saver.stall_seconds - before
        saver.wait()
        results["saves"].append(
            {
                "host_stall_s": waited, "slower_s": took - calm, "commit_s": time.perf_counter() - start,
                "bytes_in_store": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
            }
        )  # fmt: skip
        request.write(results)
    saver.close()
    shutil.rmtree(folder / "store")
    tensors = {box.name: box.data.detach() for box in state}
    last = results["saves"][-1]["commit_s"]
    if time.perf_counter() + 1.5 * last < ends:
        start = time.perf_counter()
        with (folder / "state.pt").open("wb") as file:
            torch.save(tensors, file)
            results["torch_save_s"] = time.perf_counter() - start
            file.flush()
            os.fsync(file.fileno())
            results["torch_save_and_fsync_s"] = time.perf_counter() - start
        (folder / "state.pt").unlink()
        request.write(results)
    if time.perf_counter() + 5 < ends:
        import torch.distributed.checkpoint as dcp

        start = time.perf_counter()
        pending: Any = dcp.async_save(tensors, checkpoint_id=folder / "dcp")
        results["dcp_async_save_call_s"] = time.perf_counter() - start
        request.write(results)
        pending.result()
        results["dcp_async_save_s"] = time.perf_counter() - start
        request.write(results)


def copy_rates(device: torch.device, size: int) -> dict[str, Any]:
    """Rates of copies from the device to pageable and to pinned memory."""
    source = torch.ones(size // 4, device=device)
    rates_by_name: dict[str, Any] = {"bytes": size}
    for name, pinned in (("pageable", False), ("pinned", True)):
        if pinned and device.type != "cuda":
            continue
        target = torch.zeros(size // 4, pin_memory=pinned)
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            target.copy_(source, non_blocking=pinned)
            settle(device)
            rates.append(size / (time.perf_counter() - start) / 1e9)
        rates_by_name[f"{name}_gb_per_s"] = statistics.median(rates)
    return rates_by_name


def health(request: Request) -> None:
    """The product's health check of this rank."""
    from holdfast.collectives import Gang
    from holdfast.health.examine import examine
    from holdfast.store import open_store

    device, seconds = local_device(request.accelerator), 0.5 if request.tiny else 5.0
    store = open_store(f"file://{request.store}/store")
    report = examine(Gang(), device, store, "health/", Path(request.store), seconds, "benchmark")
    request.write({"failures": len(report.failures), "report": report.model_dump(mode="json")})


def machine(request: Request) -> None:
    """The machine of the measurement."""
    cuda = torch.cuda.is_available()
    request.write(
        {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "memory": torch.cuda.get_device_properties(0).total_memory if cuda else 0, "cuda_device": cuda,
            "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
    )  # fmt: skip


MEASURES: dict[str, Callable[[Request], None]] = {
    "train": train_exactly,
    "kernels": kernels,
    "memory": memory_of,
    "mfu": mfu,
    "stall": stall,
    "health": health,
    "machine": machine,
}


class Bench:
    """Measures in child processes, and keeps the results on disk."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._out, self._folder = arguments.out, folder
        self._request = Request("machine", "cpu", arguments.tiny, arguments.steps)
        self._deadline = time.monotonic() + arguments.seconds
        self._ended = 0.0  # when the last child ended, in Unix seconds
        for module in MODULES:
            with suppress(Exception):  # the measurement that needs it reports it
                import_module(module)
        self.found: dict[str, Any] = {"machine": self._run(self._request, 60)}
        cuda = self.found["machine"].get("cuda_device", False)
        self.accelerator = "nvidia" if cuda else "cpu"
        self._request = replace(self._request, accelerator=self.accelerator)
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        (self._out / "accelerator.json").write_text(json.dumps(self.found, indent=1))
        lines = ["# One accelerator", ""]
        for section, parts in self.found.items():
            lines += [f"## {section}", "", NOTES.get(section, ""), ""]
            if section == "mfu":
                lines += ["| variant | step, s | tokens/s | MFU | TFLOP/s | peak, GiB |", "|---|---|---|---|---|---|"]
                lines += [_mfu_row(name, part) for name, part in parts.items() if "step_s" in part] + [""]
            lines += ["```", json.dumps(parts, indent=1)[:20000], "```", ""]
        (self._out / "accelerator.md").write_text("\n".join(lines))

    def measure(self, section: str, name: str, measure: str, **options: Any) -> dict[str, Any]:
        """Run one measurement and record its result, or why there is none."""
        left = self._deadline - time.monotonic()
        request = replace(self._request, measure=measure, **options)
        limit = min(left, SECONDS.get(measure, DEFAULT_SECONDS))
        result = {"error": "no time was left"} if left < 5 else self._run(request, limit)
        self.found.setdefault(section, {})[name] = result
        self.write()
        brief = {key: value for key, value in result.items() if not isinstance(value, (dict, list))}
        print(f"{section} {name}: {json.dumps(brief)}", file=sys.stderr, flush=True)
        return result

    def _run(self, request: Request, seconds: float) -> dict[str, Any]:
        result, output = self._folder / "result.json", self._folder / "output"
        result.unlink(missing_ok=True)
        request = replace(request, result=str(result), seconds=seconds)
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_a_child(request, output)
        code = None
        while code is None and time.monotonic() - began < seconds:
            code = _ended_with(child)
            time.sleep(0.02)
        cut = code is None
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also its children, such as compilers
        if cut:
            os.waitpid(child, 0)
        self._ended = time.time()
        outcome = json.loads(result.read_text()) if result.exists() else {}
        outcome |= {"wall_s": round(time.monotonic() - began, 2), "exit": code}
        if cut:
            outcome["error"] = f"cut after {seconds:.0f} s"
        elif code != (-signal.SIGKILL if request.kill else 0):
            outcome["error"] = f"exit code {code}"
        if "error" in outcome:
            outcome["output"] = output.read_text(errors="replace")[-TAIL:]
        return outcome

    def _killed_and_resumed(self, section: str) -> dict[str, Any]:
        """A run that is killed and resumed in a new process; returns the times of the recovery."""
        store = f"file://{self._folder / 'store'}"
        self.measure(section, "killed", "train", store=store, run_id="killed", kill=True)
        killed = self._ended
        resumed = self.measure(section, "resumed", "train", store=store, run_id="killed", launch=2, fresh=True)
        if not resumed.get("from_step"):
            return {"error": "the run did not resume from a checkpoint"}
        times = resumed["times"]
        return {
            "kill_to_first_step_s": times["first_step"] - killed, "python_and_imports_s": times["start"] - killed,
            "group_and_engine_s": times["engine"] - times["start"], "restore_s": times["state"] - times["engine"],
            "first_step_s": times["first_step"] - times["state"], "from_step": resumed["from_step"],
        }  # fmt: skip

    def exactness(self) -> None:
        """SIGKILL after a step, resume, and compare digests with an uninterrupted run."""
        store = f"file://{self._folder / 'store'}"
        calm = self.measure("exactness", "uninterrupted", "train", store=store, run_id="uninterrupted")
        self._recovery = self._killed_and_resumed("exactness")
        outcome = self.found["exactness"]
        outcome["same_digest"] = "digest" in calm and calm["digest"] == outcome["resumed"].get("digest")
        outcome["resumed_from_step"] = outcome["resumed"].get("from_step", 0)

    def run(self, section: str) -> None:
        """Run all measurements of a section."""
        if section == "exactness":
            self.exactness()
        elif section == "recovery":
            self.found["recovery"] = getattr(self, "_recovery", None) or self._killed_and_resumed("recovery runs")
        elif section == "mfu":
            levels = ("off", "exact", "bare")
            for variant in levels if self._request.tiny else (*levels, "off-compiled", "exact-compiled"):
                self.measure("mfu", variant, "mfu", variant=variant)
        else:
            folder = self._folder / section
            folder.mkdir()
            self.measure(section, "all", section, store=str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        self.write()


def _be_a_child(request: Request, output: Path) -> None:
    """Run a measurement, and end this process."""
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        meeting = f"{request.result}.meeting-{time.time_ns()}"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", MEETING_VARIABLE: meeting}
        if request.fresh or torch.cuda._is_in_bad_fork():
            os.execv(
                sys.executable,
                [sys.executable, "-m", "benchmarks.accelerator", "--request", json.dumps(asdict(request))],
            )
        MEASURES[request.measure](request)
        code = 0
    except BaseException:  # noqa: BLE001 - the child never returns into the parent's code
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended_with(child: int) -> int | None:
    """The exit code of a child, or the negative signal; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _mfu_row(name: str, part: dict[str, Any]) -> str:
    """A row of the report."""
    share = "-" if part["mfu"] is None else f"{100 * part['mfu']:.1f} %"
    return (
        f"| {name} | {part['step_s']:.3f} | {part['tokens_per_s']:.0f} | {share} | {part['tflops']:.0f} "
        f"| {part['peak_bytes'] / 2**30:.1f} |"
    )


def main() -> None:
    """Entry point, of the benchmark and of a measurement in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="time for everything")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas, in this order")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON and the report")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each MFU variant")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.request:
        request = Request(**json.loads(arguments.request))
        MEASURES[request.measure](request)
        return
    sections = arguments.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; there are {', '.join(SECTIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments, Path(name))
        if bench.accelerator == "cpu" and not arguments.tiny:
            parser.error("no CUDA device is visible to torch; use --tiny on a CPU")
        for section in sections:
            bench.run(section)
    print(json.dumps(bench.found))


if __name__ == "__main__":
    main()
