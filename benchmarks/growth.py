"""The cost of a large store for its readers: requests, seconds and memory with 100, 1,000 and 10,000 of each kind.

`python -m benchmarks.growth [--least 100] [--most 10000] [--stores folder s3] [--only WORD]` makes a store with N runs,
a run after N commits (in launches of 100 commits each), and a run after N launches and attempts. It reads the store as
the product does, each time in a separate process. On S3 a request is an HTTP request to moto's server. On a folder it
is a call of the store, and a listing counts once for each thousand keys. Memory is the peak of the process above its
start.

The product's writers make the objects: history, events, claims, endings, records, outcomes, step logs, checkpoints and
the collector, which folds small objects. Only the claims of 10,000 launches are put directly in the same form, because
each real claim lists the folder. No model is trained: the state is one small tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks._filled_s3 import BUCKET, FilledS3
from holdfast.checkpoint import Attempt, Retention, TensorBox, claim_attempt
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.components.notify import summary
from holdfast.launch import launches
from holdfast.launch.exits import LaunchExit
from holdfast.pipelines.backends.record import Record
from holdfast.pipelines.cli import app
from holdfast.spec import Spec, dump_spec, parse_spec
from holdfast.steps.outcomes import Outcome
from holdfast.steps.step_logs import StepStream, local_job
from holdfast.store import Store, layout, open_store
from holdfast.store.log_stream import StreamWriter, stream_name
from holdfast.store.sequence import record_key
from holdfast.telemetry import emit, read_events, read_history
from holdfast.telemetry.event_folding import fold_events
from holdfast.telemetry.event_log import recording
from holdfast.telemetry.events import (
    AttemptBegan,
    LaunchBegan,
    LaunchEnded,
    Progress,
    SaveCommitted,
    StragglerDetected,
    TimeSpent,
)
from holdfast.telemetry.history import segment
from holdfast.telemetry.ledger import ledger
from holdfast.telemetry.run_metadata import write_run_metadata
from holdfast.tracking import connect

TRAINED, RESTARTED = "a" * 16, "b" * 16  # the run with many commits; the run with many launches
NAME = "nightly"  # of all runs
COMMITS = 100  # of a launch
EVERY = 4  # steps between two commits
OLD = 7 * 86_400.0  # age in seconds of all objects except the newest ones
FIELDS: dict[str, Any] = {"dataset_id": "d", "layout": {"strategy": "ddp"}, "random": {"seed": 0}}


def spec_of(folder: Path) -> Spec:
    """The spec of all runs."""
    return parse_spec(f"""
name: {NAME}
data: {{sources: [{{uri: "{folder}/text/*.txt"}}], tokenizer: {{kind: bpe, vocabulary: 300}}}}
model: {{layers: 1, hidden: 8, heads: 1, kv_heads: 1, context: 8}}
training: {{steps: 1000000, global_batch: 1, micro_batch: 1}}
""")


def make(folder: Path, many: int) -> None:
    """A store in `folder` after `many` commits, launches and runs."""
    store, spec = open_store(f"file://{folder}/store"), spec_of(folder)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("text\n" * 100)
    _many_runs(store, spec, folder, many)
    _many_commits(store, spec, many)
    _many_launches(store, many)
    store.delete(layout.collector(TRAINED))
    old = time.time() - OLD
    for path in (folder / "store").rglob("*"):
        if path.is_file():
            os.utime(path, (old + path.stat().st_mtime % 86_400, old))
    _submit(store, folder, TRAINED)


def _many_commits(store: Store, spec: Spec, many: int) -> None:
    write_run_metadata(store, TRAINED, spec, "d", "")
    for launch in range(1, max(1, many // COMMITS) + 1):
        number = launches.claim_launch(store, TRAINED, {})
        attempt = claim_attempt(store, TRAINED, launch=number)
        store.delete(layout.collector(TRAINED))  # of a process that has ended
        collector = Collector(store, attempt, Retention(3))
        with recording(store, TRAINED, "rank 0", launch=number, attempt=attempt.number):
            emit(AttemptBegan(world=2, step=0, steps=1_000_000, device="cpu"))
            for commit in range((launch - 1) * COMMITS, min(launch * COMMITS, many)):
                _commit(store, attempt, commit, whole=commit >= many - 3)
                collector._lease.take()
                collector._fold_telemetry()
        _fold_events(store, attempt)
        launches.record_exit(
            store, TRAINED, number, LaunchExit.model_validate({"code": 1, "blamed_nodes": [], "ended": time.time()})
        )


def _commit(store: Store, attempt: Attempt, commit: int, *, whole: bool) -> None:
    """The objects of one commit. Only the last commits get a checkpoint, because the collector removes the earlier
    ones."""
    step = (commit + 1) * EVERY
    rows = [
        {
            "step": step - EVERY + 1 + offset,
            "time": 1.0,
            "loss": 2.0,
            "grad_norm": 1.0,
            "learning_rate": 0.001,
            "tokens": 8,
            "tokens_per_second": 100.0,
            "step_seconds": 0.1,
        }
        for offset in range(EVERY)
    ]
    for key, text in segment(TRAINED, step - EVERY, rows, attempt.number).items():
        store.put(key, text.encode())
    if whole:
        ShardWriter(store, attempt, 0).write(step, [TensorBox.whole("weight", torch.full((4,), float(step)))])
        first = attempt.number * COMMITS * EVERY
        history = [(number * COMMITS * EVERY, number + 1) for number in range(attempt.number) if first]
        Committer(store, attempt, 1).commit(step, {**FIELDS, "history": history}, {})
    emit(Progress(step=step, steps=1_000_000, loss=2.0, tokens_per_second=100.0, seconds_left=9.0))
    for rank in range(2):
        emit(TimeSpent(rank=rank, step=step, seconds={"forward": 0.2, "backward": 0.2}))
    emit(SaveCommitted(step=step, seconds=0.5))


def _many_launches(store: Store, many: int) -> None:
    for number in range(1, many + 1):
        claim = {"host": "h", "pid": 1, "claimed": time.time(), "nonce": "", "assignment": {}, "replan": False}
        store.put(record_key(layout.launches(RESTARTED), number), json.dumps(claim).encode())
        store.put(record_key(layout.attempts(RESTARTED), number), json.dumps({**claim, "launch": number}).encode())
        attempt = Attempt(RESTARTED, number, number)
        with recording(store, RESTARTED, "rank 0", launch=number, attempt=attempt.number):
            emit(LaunchBegan(job="job", nodes=1, processes=1))
            emit(AttemptBegan(world=1, step=1, steps=1_000_000, device="cpu"))
            emit(StragglerDetected(rank=0, host="n1", phase="forward", ratio=2.0, seconds=1.0, step=1))
            emit(LaunchEnded(code=1))
        if number % 32 == 0:
            _fold_events(store, attempt)
        ending = {"code": 1, "blamed_nodes": [f"node-{number % 50}"], "ended": time.time()}
        launches.record_exit(store, RESTARTED, number, LaunchExit.model_validate(ending))


def _fold_events(store: Store, attempt: Attempt) -> None:
    """Fold events as the collector does. All processes except that of the last launch ended hours ago."""
    paths = sorted(Path(store.url.removeprefix("file://"), "runs", attempt.run_id, "events").glob("*.jsonl"))
    for path in paths[:-1]:
        os.utime(path, (time.time() - OLD,) * 2)
    fold_events(store, attempt.run_id, lambda: attempt.check(store))


def _many_runs(store: Store, spec: Spec, folder: Path, many: int) -> None:
    for number in range(many):
        run_id = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        write_run_metadata(store, run_id, spec, "d", "")
        store.put(layout.result(run_id), b'{"step": 10, "loss": 1.5}')
        claim_attempt(store, run_id)
        _submit(store, folder, run_id)


@functools.cache
def _dumped(folder: Path) -> str:
    return dump_spec(spec_of(folder))


def _submit(store: Store, folder: Path, run_id: str) -> None:
    """The record of a submission, the outcome of a step, and its log."""
    log = f"{folder}/home/logs/{run_id}/run-1-1.log"
    Record("local", run_id, run_id, NAME, _dumped(folder), time.time(), job=local_job(log), log=log).write(store)
    outcome = Outcome(step="train", exit_code=0, started=time.time(), ended=time.time(), pid=1)
    store.put(layout.job(local_job(log), "train"), outcome.as_json())
    stream = StepStream(name=stream_name(), step="train", node="n", pid=1, began=1.0, ended=2.0, code=0)
    writer = StreamWriter(lambda: store, layout.step_log(local_job(log), "train"), stream)
    writer.add(b"a line\n" * 20)
    writer.flush(last=True)


def _command(*arguments: str) -> Callable[[Store, Path, int], None]:
    def call(store: Store, folder: Path, many: int) -> None:  # noqa: ARG001
        command = [argument.replace("FOLDER", str(folder)) for argument in arguments]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
            app([*command, "--store", store.url], standalone_mode=False)
        if not printed.getvalue():
            raise RuntimeError(f"{command}: printed nothing")

    return call


def _launch(store: Store, folder: Path, many: int) -> None:
    cluster = spec_of(folder).cluster.model_copy(update={"stragglers": "exclude"})
    launches.avoided_nodes(store, RESTARTED, cluster)
    launches.was_reclaimed(store, RESTARTED, many)
    launches.newest_launch(store, RESTARTED)


def _endings(store: Store, folder: Path, many: int) -> None:  # noqa: ARG001
    launches.read_exits(store, RESTARTED)
    launches.nodes_of_the_last_end(store, RESTARTED)


def _collect(store: Store, folder: Path, many: int) -> None:  # noqa: ARG001
    attempt = Attempt(TRAINED, max(1, many // COMMITS), max(1, many // COMMITS))
    Collector(store, attempt, Retention(3)).collect(many * EVERY)


def _trigger(store: Store, folder: Path, many: int) -> None:  # noqa: ARG001
    from holdfast.components.trigger.step import run

    run(spec_of(folder), store)


def _summary(store: Store, folder: Path, many: int) -> None:  # noqa: ARG001
    summary.run("failed", dump_spec(spec_of(folder)), store.url, RESTARTED, message="x")


READINGS: dict[str, Callable[[Store, Path, int], object]] = {
    "read_history, N commits": lambda store, *_: read_history(store, TRAINED),
    "read_history of what is new": lambda store, _, many: read_history(store, TRAINED, after=(many - 1) * EVERY),
    "read_events, N commits": lambda store, *_: read_events(store, TRAINED),
    "read_events, N launches": lambda store, *_: read_events(store, RESTARTED),
    "ledger, N commits": lambda store, *_: ledger(read_events(store, TRAINED)),
    "notify's summary, N launches": _summary,
    "what a launch reads, N launches": _launch,
    "endings, N launches": _endings,
    "holdfast runs, N runs": _command("runs"),
    "holdfast show NAME, N runs and commits": _command("show", NAME),
    "holdfast logs NAME, N runs": _command("logs", NAME),
    "holdfast report, N commits": _command("report", TRAINED, "--output", "FOLDER/page.html"),
    "trigger, N runs": _trigger,
    "collector, N commits": _collect,
}


class Counter:
    """Counts requests: of HTTP, and the calls of a folder store."""

    def __init__(self) -> None:
        self.requests = 0
        self._inside = threading.local()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Count in this process from now on."""
        from botocore.httpsession import URLLib3Session

        from holdfast.store.file import FileStore

        for name in (
            "put",
            "put_if_absent",
            "compare_and_swap",
            "get",
            "get_versioned",
            "read_into",
            "stat",
            "folders",
            "delete_many",
        ):
            self._wrap(FileStore, name)
        self._wrap(URLLib3Session, "send")
        original_list = FileStore.list

        def paged(store: FileStore, prefix: str, after: str = "") -> Iterator[Any]:
            for number, info in enumerate(original_list(store, prefix, after)):
                if number % 1000 == 0:
                    self._add(1)
                yield info

        FileStore.list = paged  # type: ignore[method-assign]

    def _wrap(self, kind: type, name: str) -> None:
        work = getattr(kind, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "on", False):
                return work(*arguments, **options)
            self._add(1)
            self._inside.on = True
            try:
                return work(*arguments, **options)
            finally:
                self._inside.on = False

        setattr(kind, name, counted)

    def _add(self, number: int) -> None:
        with self._lock:
            self.requests += number


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _measured(answer: Any, name: str, url: str, folder: Path, many: int) -> None:
    counter = Counter()
    counter.watch()
    store = open_store(url)
    store.stat("nothing")  # the client is made
    torch.set_num_threads(1)
    counter.requests = 0
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _memory("VmRSS"), time.perf_counter()
    READINGS[name](store, folder, many)
    answer.send((counter.requests, time.perf_counter() - start, _memory("VmHWM") - before))


def _in_a_process(work: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit("a process failed; its reason stands above") from None
    finally:
        process.join()


def _make(answer: Any, folder: Path, many: int) -> None:
    make(folder, many)
    answer.send(None)


def _sizes(most: int) -> list[int]:
    return [size for size in (100, 1000, 10_000, 100_000) if size <= most] or [most]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--least", type=int, default=100)
    parser.add_argument("--stores", nargs="+", default=["folder", "s3"], choices=["folder", "s3"])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    for name in ("mlflow", "holdfast.components.trigger.step", "holdfast.pipelines.view.page"):
        importlib.import_module(name)  # once, so that no reading includes it
    sizes = [size for size in _sizes(arguments.most) if size >= arguments.least]
    results: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    memory_folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    os.environ.update(
        AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true"
    )
    for count in sizes:
        with tempfile.TemporaryDirectory(dir=memory_folder, prefix="growth-") as name:
            folder = Path(name)
            os.environ["HOLDFAST_HOME"] = str(folder / "home")
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
            start = time.perf_counter()
            _in_a_process(_make, folder, count)
            _in_a_process(lambda answer: answer.send(connect() and None))
            print(f"{count}: made in {time.perf_counter() - start:.0f} s", flush=True)
            for kind in sorted(arguments.stores, reverse=True):  # the folder comes last: the collector changes it
                with FilledS3(folder / "store") if kind == "s3" else contextlib.nullcontext("") as endpoint:
                    os.environ["AWS_ENDPOINT_URL"] = endpoint or "http://127.0.0.1:1"
                    url = f"s3://{BUCKET}" if kind == "s3" else f"file://{folder}/store"
                    for reading in READINGS:
                        if arguments.only in reading:
                            figures = _in_a_process(_measured, reading, url, folder, count)
                            results.setdefault((kind, reading), []).append(figures)
                            print(json.dumps([count, kind, reading, figures]), flush=True)
    heads = " | ".join(f"{size:,}" for size in sizes)
    for kind in arguments.stores:
        print(f"\n| {kind}: requests; seconds; MiB of N = | {heads} |\n|---|{'---|' * len(sizes)}")
        for reading in READINGS:
            if (rows := results.get((kind, reading))) is not None:
                cells = [f"{requests:.0f}; {seconds:.2f}; {peak / 2**20:.0f}" for requests, seconds, peak in rows]
                print(f"| {reading} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
