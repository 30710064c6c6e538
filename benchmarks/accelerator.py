"""One accelerator: exactness, kernels, memory against the plan, MFU, recovery, save stall and health, in one run.

`python -m benchmarks.accelerator [--seconds N] [--only exactness,mfu] [--out FOLDER] [--tiny]` needs a CUDA device and
no network. Every measurement is a process of its own with a time limit. `accelerator.json` is rewritten after each one,
so a run that is cut keeps its figures; a measurement that fails is recorded with its output and the next one starts.
`accelerator.md` is the report. `--tiny` uses small shapes, on the CPU if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.launch.device import MEETING_VARIABLE, join_gang, local_device

SECTIONS = ("exactness", "kernels", "memory", "mfu", "recovery", "stall", "health")
MEASUREMENT_SECONDS = 150.0  # the longest time of one measurement
EXACT_STEPS, SAVE_EVERY, KILL_AFTER = 12, 3, 7
TAIL = 4000  # characters of a failed measurement's output that are kept
END_OF_TEXT = 0


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

    model, _, micro, whole = shapes(size)
    masks = bool(training.pop("masks", False))
    document = {
        "name": "accelerator",
        "data": {"sources": [{"uri": "none"}], "document_masks": masks},
        "model": model,
        "training": {"steps": 100, "global_batch": whole, "micro_batch": micro, **training},
        "parallel": {"processes": 1},
        "cluster": {"accelerator": accelerator},
    }
    return parse_spec(json.dumps(document), [])


def engine_for(spec: Any, vocabulary: int) -> Any:
    """The engine of a spec, with its determinism set."""
    from holdfast.components.train.assignment import Assignment
    from holdfast.components.train.engine import build_engine
    from holdfast.components.train.randomness import make_deterministic

    make_deterministic(spec.training.determinism, torch.get_num_threads())
    return build_engine(Assignment.of(spec, "accelerator", "none"), vocabulary, END_OF_TEXT)


def fill(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Random matrices and norms of one, made on the device."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


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

    whole = blake3()
    for box in sorted(boxes, key=lambda each: each.name):
        whole.update(box.name.encode())
        whole.update(box.data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def train_exactly(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train to the last step with saves, from the newest checkpoint; ends by SIGKILL after a step if `kill`."""
    from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.collectives import Gang
    from holdfast.components.train.weights import SeededState
    from holdfast.store import open_store

    size = "tiny" if arguments.tiny else "small"
    model, vocabulary, _, whole = shapes(size)
    spec = spec_for(size, arguments.accelerator, determinism="exact", precision="bf16")
    device, start = local_device(arguments.accelerator), time.perf_counter()
    join_gang(device, always=True)
    gang, store = Gang(), open_store(arguments.store)
    engine = engine_for(spec, vocabulary)
    attempt = claim_attempt(store, arguments.run_id, launch=arguments.launch)
    saver = Checkpointer(
        store, attempt, Retention(2), describe={"dataset_id": "none", "layout": engine.layout, "random": {}}, gang=gang,
        options=SaveOptions(max_lag_steps=SAVE_EVERY),
    )  # fmt: skip
    began = saver.restore(engine.boxes(), SeededState(spec.model, 0).fill)
    engine.restored(began)
    first, losses = 0.0, []
    for step in range(began + 1, EXACT_STEPS + 1):
        out = engine.step(rows_for(step, whole, model["context"], vocabulary), 1e-3, saver.wait_for_staging)
        losses.append(out.loss.item())
        first = first or time.perf_counter() - start
        if arguments.kill and step == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % SAVE_EVERY == 0:
            saver.save(step, engine.saved(), engine.scalars(step))
            if arguments.kill:
                saver.wait()  # a checkpoint is there when the process dies
    saver.wait()
    settle(device)
    reduced = torch.arange(1 << 20, device=device, dtype=torch.float32) / 3
    before = reduced.clone()
    dist.all_reduce(reduced)
    found = {
        "from_step": began, "digest": digest(engine.boxes()), "last_loss": losses[-1], "start_to_first_step_s": first,
        "backend": dist.get_backend(), "all_reduce_same_bits": bool(torch.equal(before, reduced)),
    }  # fmt: skip
    saver.close()
    dist.destroy_process_group()
    return found


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which attention and which kernels one bf16 step runs, with and without document masks."""
    from torch.profiler import ProfilerActivity, profile

    size, found = "tiny" if arguments.tiny else "small", {}
    model, vocabulary, _, whole = shapes(size)
    for masks in (False, True):
        spec = spec_for(size, arguments.accelerator, determinism="exact", precision="bf16", masks=masks)
        engine = engine_for(spec, vocabulary)
        fill(engine._parts[0].parameters())
        rows = rows_for(1, whole, model["context"], vocabulary)
        engine.step(rows, 1e-3)
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as taken:
            engine.step(rows, 1e-3)
            settle(local_device(arguments.accelerator))
        events = taken.key_averages()
        attention = sorted({e.key for e in events if "dot_product" in e.key or "flash" in e.key.lower()})
        on_device = sorted((e for e in events if e.self_device_time_total > 0), key=lambda e: -e.self_device_time_total)
        found["document masks" if masks else "plain"] = {
            "attention": attention,
            "math": any("attention_math" in name for name in attention),
            "top": [[e.key[:160], round(e.self_device_time_total / 1e3, 3), e.count] for e in on_device[:20]],
        }
    return found


def planned_bytes(spec: Any, vocabulary: int, kind: str) -> dict[str, float]:
    """The planner's terms for one rank."""
    from holdfast.planning import ACCELERATORS
    from holdfast.planning.layout import Layout
    from holdfast.planning.memory import Updates, memory, practice_here
    from holdfast.planning.shape import Architecture

    layout = Layout(micro_batch=spec.training.micro_batch, checkpointing=spec.training.activation_checkpointing)
    practice = practice_here(spec.training.precision, layout, kind, spec.data.document_masks, Updates.of(spec.training))
    return dict(
        memory(
            Architecture.of(spec.model, vocabulary), layout, ACCELERATORS["H100"],
            global_batch=spec.training.global_batch, precision=spec.training.precision, practice=practice,
        ).terms
    )  # fmt: skip


def memory_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of a step against the plan."""
    from benchmarks._living import Living

    size = "tiny" if arguments.tiny else "small" if arguments.variant == "small" else "large"
    model, vocabulary, _, whole = shapes(size)
    device = local_device(arguments.accelerator)
    spec = spec_for(size, arguments.accelerator, precision="bf16", activation_checkpointing=arguments.checkpointing)
    terms = planned_bytes(spec, vocabulary, "nvidia" if device.type == "cuda" else "cpu")
    engine = engine_for(spec, vocabulary)
    rows = rows_for(1, whole, model["context"], vocabulary)
    fill(engine._parts[0].parameters())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        engine.step(rows, 1e-4)
        settle(device)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        with Living([box.data for box in engine.boxes()]) as living:
            engine.step(rows, 1e-4)
        peak, reserved = living.peak, 0
    plan = sum(size for name, size in terms.items() if name != "fragmentation" and "driver" not in name)
    return {"peak": peak, "reserved": reserved, "planned": plan, "planned_over_peak": plan / peak, "terms": terms}


def mfu(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and MFU of one variant: `bare`, `off` or `exact`, and `-compiled`."""
    from holdfast.components.train.assignment import Assignment
    from holdfast.components.train.throughput import Throughput
    from holdfast.launch.device import device_name

    size = "tiny" if arguments.tiny else "large"
    model, vocabulary, micro, whole = shapes(size)
    level, _, compiled = arguments.variant.partition("-")
    device = local_device(arguments.accelerator)
    training = {"determinism": "exact" if level == "exact" else "off", "precision": "bf16", "compile": bool(compiled)}
    spec = spec_for(size, arguments.accelerator, **training)
    began = time.perf_counter()
    if level == "bare":
        step = bare_step(spec, vocabulary, device, micro, bool(compiled))
    else:
        engine = engine_for(spec, vocabulary)
        fill(engine._parts[0].parameters())
        step = lambda rows: engine.step(rows, 1e-4)  # noqa: E731
    batches = [rows_for(number, whole, model["context"], vocabulary) for number in range(arguments.steps + 2)]
    for rows in batches[:2]:
        step(rows)
    settle(device)
    built, taken = time.perf_counter() - began, []
    for rows in batches[2:]:
        start = time.perf_counter()
        step(rows)
        settle(device)
        taken.append(time.perf_counter() - start)
    seconds = statistics.median(taken)
    work = Throughput.of(Assignment.of(spec, "accelerator", "none"), vocabulary, 1, device_name(device))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "step_s": seconds, "worst_s": max(taken), "tokens_per_s": work.tokens / seconds, "mfu": work.mfu(seconds),
        "tflops": work.flops / seconds / 1e12, "build_s": built, "peak_bytes": peak, "steps": len(taken),
    }  # fmt: skip


def bare_step(spec: Any, vocabulary: int, device: torch.device, micro: int, compiled: bool) -> Any:
    """A bare torch loop over the same model: autocast, clip, fused AdamW."""
    from holdfast.components.train.engines.torch.optimizers import decay_groups
    from holdfast.model.decoder import Decoder

    torch.backends.cuda.matmul.allow_tf32 = True
    with device:
        model = Decoder(spec.model, vocabulary)
    fill(model.parameters())
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


def stall(arguments: argparse.Namespace) -> dict[str, Any]:
    """Copies of 1 GiB from the device to pageable and to pinned memory, and what a save keeps training waiting."""
    device = local_device(arguments.accelerator)
    size = 2**20 if arguments.tiny else 2**30
    source = torch.ones(size // 4, device=device)
    found: dict[str, Any] = {"bytes": size}
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
        found[f"{name}_gb_per_s"] = statistics.median(rates)
    return found


def health(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rates of the health probes."""
    from holdfast.health import compute

    device, seconds = local_device(arguments.accelerator), 0.2 if arguments.tiny else 3.0
    return {
        "compute": compute.compute_rate(device, seconds), "memory": compute.memory_rate(device, seconds),
        "exact_product": compute.exact_product_is_right(device), "product_bits": compute.product_bits(device),
    }  # fmt: skip


MEASURES = {
    "train": train_exactly,
    "kernels": kernels,
    "memory": memory_of,
    "mfu": mfu,
    "stall": stall,
    "health": health,
}


class Bench:
    """Measures in child processes, and keeps the results on disk."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._deadline = time.monotonic() + arguments.seconds
        self.found: dict[str, Any] = {"machine": _machine()}
        self.write()

    def write(self) -> None:
        """Write what was measured so far."""
        whole = json.dumps(self.found, indent=1)
        (self._arguments.out / "accelerator.json").write_text(whole)
        lines = ["# One accelerator", ""]
        for section, parts in self.found.items():
            lines += [f"## {section}", "", "```", json.dumps(parts, indent=1)[:20000], "```", ""]
        (self._arguments.out / "accelerator.md").write_text("\n".join(lines))

    def measure(self, section: str, name: str, measure: str, *options: str) -> dict[str, Any]:
        """Run one measurement and record its result, or why there is none."""
        left = self._deadline - time.monotonic()
        result = {"error": "no time was left"} if left < 5 else self._run(measure, options, left)
        self.found.setdefault(section, {})[name] = result
        self.write()
        brief = {key: value for key, value in result.items() if not isinstance(value, (dict, list))}
        print(f"{section} {name}: {json.dumps(brief)}", file=sys.stderr, flush=True)
        return result

    def _run(self, measure: str, options: Iterable[str], left: float) -> dict[str, Any]:
        result, meeting = self._folder / "result.json", self._folder / f"meeting-{time.time_ns()}"
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.accelerator", "--measure", measure, "--result", str(result)]
        command += [*options, *(["--tiny"] if self._arguments.tiny else []), f"--steps={self._arguments.steps}"]
        command += [f"--accelerator={self._arguments.accelerator}"]
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", MEETING_VARIABLE: str(meeting)}
        began = time.monotonic()
        try:
            ended = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, check=False,
                timeout=min(left, MEASUREMENT_SECONDS),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return {"error": f"cut after {error.timeout:.0f} s", "output": str(error.stderr or "")[-TAIL:]}
        wall = {"wall_s": round(time.monotonic() - began, 2), "exit": ended.returncode}
        if ended.returncode == 0 and result.exists():
            return json.loads(result.read_text()) | wall
        if "--kill" in options and ended.returncode == -signal.SIGKILL:
            return wall
        return {"error": f"exit code {ended.returncode}", "output": (ended.stdout + ended.stderr)[-TAIL:]} | wall

    def exactness(self) -> None:
        """kill -9 after a step, resume, and compare digests with an undisturbed run."""
        store, digests = f"--store=file://{self._folder / 'store'}", {}
        for name, options in {
            "calm": ("--run-id=calm", "--launch=1"), "again": ("--run-id=again", "--launch=1"),
            "killed": ("--run-id=killed", "--launch=1", "--kill"), "resumed": ("--run-id=killed", "--launch=2"),
        }.items():  # fmt: skip
            digests[name] = self.measure("exactness", name, "train", store, *options).get("digest")
        found = self.found["exactness"]
        calm = digests["calm"]
        found["same_digest"] = calm is not None and calm == digests["again"] == digests["resumed"]
        found["resumed_from_a_checkpoint"] = found["resumed"].get("from_step", 0) > 0
        self.write()

    def recovery(self) -> None:
        """From the start of a process to its first step after a restore."""
        if "exactness" not in self.found:
            self.exactness()
        resumed = self.found["exactness"]["resumed"]
        self.found["recovery"] = {key: resumed.get(key) for key in ("from_step", "start_to_first_step_s", "wall_s")}
        self.write()

    def run(self, section: str) -> None:
        """Run all measurements of a section."""
        if section == "exactness":
            self.exactness()
        elif section == "recovery":
            self.recovery()
        elif section == "mfu":
            levels = ["off", "exact", "bare"]
            for variant in levels if self._arguments.tiny else [*levels, *(f"{each}-compiled" for each in levels)]:
                self.measure("mfu", variant, "mfu", f"--variant={variant}")
        elif section == "memory":
            for checkpointing in ("none",) if self._arguments.tiny else ("none", "selective", "full"):
                self.measure("memory", checkpointing, "memory", f"--checkpointing={checkpointing}", "--variant=small")
            if not self._arguments.tiny:
                self.measure("memory", "large", "memory", "--variant=large")
        else:
            self.measure(section, section, section)


def _machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "memory": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    """Entry point, of the benchmark and of its measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="time for everything")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas, in this order")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON and the report")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each MFU variant")
    for option in ("measure", "variant", "store", "run-id"):
        parser.add_argument(f"--{option}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--launch", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--accelerator", default="nvidia" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.measure:
        arguments.result.write_text(json.dumps(MEASURES[arguments.measure](arguments)))
        return
    sections = arguments.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections {sorted(unknown)}; there are {', '.join(SECTIONS)}")
    if arguments.accelerator == "cpu" and not arguments.tiny:
        parser.error("no CUDA device is visible to torch; use --tiny on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments, Path(name))
        for section in sections:
            bench.run(section)
    print(json.dumps(bench.found))


if __name__ == "__main__":
    main()
