"""Cost of the saves of a training script: a session of Holdfast, torch's DCP, Hugging Face's Trainer, and Lightning.

`python -m benchmarks.session [--mib N] [--rounds N]` trains the same model on one rank with one thread, in windows of
10 steps. A window with a save at its beginning alternates with one without, in one process. A window ends when its save
is complete. Windows of the session without a save make no call of it: they are the script alone. For each of them it
prints:

- the time of a window with a save over that of one without, by medians and by minima (bar for the session: 1.02)
- the same by the processor time of the training thread, which other load changes little
- the stall of a save, and the bytes that a save writes
- the seconds from SIGKILL to the next step of the process that resumes. Only a session has a supervisor; the others are
  started again immediately.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

WINDOW = 10  # steps
TIMES = "times.jsonl"
KINDS = ("session", "dcp", "transformers", "lightning")


def width_for(mib: int) -> int:
    """The width at which weights and AdamW's state are about this many MiB, in 8 layers."""
    return max(64, round((mib * 2**20 / 12 / 8) ** 0.5))


class Model(nn.Module):
    """Eight linear layers, with the interface of a model of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The loss of rows."""
        return {"loss": (self.layers(x) - (0 if labels is None else labels)).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of one width."""

    def __init__(self, width: int, count: int) -> None:
        self.x, self.count = torch.randn(64, width), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index % 64], "labels": self.x[(index + 1) % 64]}


class Clock:
    """Times of steps, one line of a file for each, so that a killed process leaves what it measured."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder, TIMES).open("a", buffering=1)  # noqa: SIM115 - until the process is killed
        self.last, self.worked = time.perf_counter(), time.thread_time()

    def step(self, step: int, saved: bool) -> None:
        """Record a step, and whether a save began with it."""
        now, worked = time.perf_counter(), time.thread_time()
        times = {"seconds": now - self.last, "processor": worked - self.worked, "at": time.time()}
        self.file.write(json.dumps({"step": step, "saved": saved, **times}) + "\n")
        self.last, self.worked = now, worked


def due(step: int) -> bool:
    """Whether a save begins after a step: at the beginning of every second window."""
    return step % (2 * WINDOW) == 0


def in_window_of_save(step: int) -> bool:
    """Whether a step is in a window that begins with a save."""
    return step % (2 * WINDOW) < WINDOW


def loop(arguments: argparse.Namespace, kind: str) -> None:
    """A bare loop that saves by a session or by torch's DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import holdfast
    from holdfast.script.session import ManagedSession

    model = Model(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start, pending, session = 0, None, None
    folder = Path(arguments.folder)
    if kind == "session":
        session = holdfast.session(seed=1)
        start = session.restore(model=model, optimizer=optimizer, steps=arguments.steps)
    else:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet-{os.getpid()}", rank=0, world_size=1
        )
        if found := sorted(folder.glob("dcp-*/.metadata")):
            start = int(found[-1].parent.name[4:])
            weights, moments = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=found[-1].parent)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    rows = torch.randn(arguments.rows, arguments.width)
    clock = Clock(arguments.folder)
    done = start  # steps that the session knows
    for step in range(start + 1, arguments.steps + 1):
        model(rows)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(session, ManagedSession):
            if in_window_of_save(step):
                done += 1
                session.step(done)
            if due(step):
                session.save(done)
            if due(step + 1 + WINDOW):
                session._checkpointer.wait()
        elif pending is not None and due(step + 1 + WINDOW):
            pending.result()
        elif due(step):
            weights, moments = get_state_dict(model, optimizer)
            pending = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"dcp-{step:06d}")
        clock.step(step, due(step))
    if pending is not None:
        pending.result()
    if kind != "session":
        os._exit(0)


def transformers(arguments: argparse.Namespace) -> None:
    """Hugging Face's Trainer with its own saves."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    clock = Clock(arguments.folder)

    class Times(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = due(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                clock.step(state.global_step, due(state.global_step))

    settings = TrainingArguments(
        arguments.folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.rows,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
    )
    data = Rows(arguments.width, arguments.rows * arguments.steps)
    trainer = Trainer(model=Model(arguments.width), args=settings, train_dataset=data, callbacks=[Times()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.folder))


def lightning(arguments: argparse.Namespace) -> None:
    """Lightning's Trainer with its own saves."""
    import lightning.pytorch as pl

    clock, folder = Clock(arguments.folder), Path(arguments.folder)

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(arguments.width)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Times(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if due(trainer.global_step):
                trainer.save_checkpoint(folder / f"step-{trainer.global_step:06d}.ckpt")
            clock.step(trainer.global_step, due(trainer.global_step))

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_steps=arguments.steps, accelerator="cpu", callbacks=[Times()], enable_checkpointing=False, **quiet
    )
    data = torch.utils.data.DataLoader(Rows(arguments.width, arguments.rows * arguments.steps), arguments.rows)
    found = sorted(folder.glob("step-*.ckpt"))
    trainer.fit(Lit(), data, ckpt_path=found[-1] if found else None, weights_only=False)


def read_times(folder: Path) -> list[dict[str, Any]]:
    """The steps so far."""
    path = folder / TIMES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(folder: Path, count: int, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The steps, once there are `count`."""
    while len(times := read_times(folder)) < count:
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.returncode}")
        time.sleep(0.05)
    return times


def write_spec(folder: Path, words: list[str]) -> Path:
    """A spec that runs the loop of this file as a script."""
    code = folder / "code"
    code.mkdir()
    shutil.copy(__file__, code / "train.py")
    arguments = json.dumps(words)
    text = f"name: session\ntrain: {{script: train.py, arguments: {arguments}, determinism: off, log_every: 1000000}}\n"
    (code / "spec.yaml").write_text(f"{text}checkpoint: {{every_steps: 100000000, keep_last: 2}}\n")
    return code / "spec.yaml"


def rank_of(command: subprocess.Popen[bytes]) -> psutil.Process:
    """The rank of a managed run."""
    family = psutil.Process(command.pid).children(recursive=True)
    return next(
        one for one in family if "holdfast.script.process" in " ".join(one.cmdline()) and "RANK" in one.environ()
    )


def measure(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one kind: it trains, is killed between two saves, and trains on."""
    with tempfile.TemporaryDirectory(prefix="holdfast-session-", dir=options.directory) as name:
        folder = Path(name)
        steps = 2 * WINDOW * (options.rounds + 1)
        words = ["--kind", kind, "--width", str(width_for(options.mib)), "--steps", str(10**6), "--folder", name]
        words += ["--rows", str(options.rows)]
        command = [sys.executable, "-m", "benchmarks.session", *words]
        if kind == "session":
            spec = write_spec(folder, words)
            command = [
                str(Path(sys.executable).with_name("holdfast")),
                "run",
                str(spec),
                "--store",
                f"file://{name}/store",
            ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_HOME": f"{name}/home", "HF_HUB_OFFLINE": "1"}
        log = (folder / "log").open("wb")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            times = wait_for(folder, steps, process)
            if kind == "session":
                rank_of(process).kill()
            else:
                process.kill()
                process.wait()
            killed = time.time()
            if kind != "session":
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            again = next(one for one in wait_for(folder, len(read_times(folder)) + 1, process) if one["at"] > killed)
        finally:
            process.terminate()
            process.wait()
        return summary(times, folder) | {"restart_seconds": again["at"] - killed}


def _sums(windows: list[list[dict[str, Any]]], field: str, *, saved: bool) -> list[float]:
    """The sum of a field over each window that begins with a save, or over each other one."""
    return [sum(one[field] for one in window) for window in windows if window[0]["saved"] == saved]


def summary(times: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Figures of the steps after the first window, and of the files."""
    windows = [times[first : first + WINDOW] for first in range(2 * WINDOW - 1, len(times) - WINDOW + 1, WINDOW)]
    with_save, without = (_sums(windows, "seconds", saved=saved) for saved in (True, False))
    work, work_without = (_sums(windows, "processor", saved=saved) for saved in (True, False))
    usual = statistics.median(one["seconds"] for window in windows for one in window if not one["saved"])
    stall = statistics.median(one["seconds"] for window in windows for one in window if one["saved"]) - usual
    packs: Counter[str] = Counter()  # bytes by step: older packs wait for their collection
    for path in folder.glob("store/runs/*/packs/*"):
        packs[path.name.split("-")[1]] += path.stat().st_size
    saves = [path for path in folder.iterdir() if path.name.startswith(("dcp-", "checkpoint-", "step-"))]
    files = [[one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file()] for path in saves]
    size = statistics.median(packs.values()) if packs else max((sum(one) for one in files), default=0)
    ratio = statistics.median(with_save) / statistics.median(without)
    least = min(with_save) / min(without)
    processor = statistics.median(work) / statistics.median(work_without)
    return {
        "ratio": ratio,
        "least": least,
        "processor": processor,
        "step_seconds": usual,
        "stall_seconds": stall,
        "mib_per_save": size / 2**20,
    }


def main() -> None:
    """Run one kind, or measure all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="folder for all files; default: that of temporary files")
    parser.add_argument("--only", choices=KINDS, action="append")
    for name, kind in (("kind", str), ("width", int), ("steps", int), ("folder", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        run = {"transformers": transformers, "lightning": lightning}.get(arguments.kind)
        if run is None:
            loop(arguments, arguments.kind)
        else:
            run(arguments)
        return
    print(f"{'':14}{'with saves: medians, minima, thread':>44}{'stall':>10}{'MiB a save':>12}{'kill to next step':>20}")
    for kind in arguments.only or KINDS:
        found = measure(kind, arguments)
        print(
            f"{kind:14}{found['ratio']:>23.3f}x{found['least']:>9.3f}x{found['processor']:>9.3f}x{found['stall_seconds']:>9.3f}s{found['mib_per_save']:>12.1f}"
            f"{found['restart_seconds']:>19.1f}s   (a step takes {found['step_seconds']:.3f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
