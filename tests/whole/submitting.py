"""`holdfast` as a user of an engine on this machine calls it, and the state of the run."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.checkpoint import read_manifest
from holdfast.store import open_store
from tests import empty_mlflow, warm
from tests.whole import small

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
STEPS = ("divide", "tokenise", "preprocess", "evaluate", "register")
ON_TWO_NODES = (
    "cluster.nodes={min: 2, max: 2}", "cluster.resources={cpu: 1, memory: 1Gi, shared_memory: 64Mi}",
    f"cluster.steps={{{', '.join(f'{step}: {{cpu: 1, memory: 1Gi}}' for step in STEPS)}}}",
    "cluster.restarts={backoff_seconds: 0}", "cluster.environment={GLOO_SOCKET_IFNAME: lo}", "training.micro_batch=2",
)  # fmt: skip


def until(condition: Callable[[], T], seconds: float) -> T:
    """Wait until a condition holds, and return its value; raises TimeoutError."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.1)
    return value


class Submitter:
    """A folder with a corpus and a spec for two nodes, a home with the store, and the `holdfast` command."""

    def __init__(
        self, folder: Path, home: Path, environment: dict[str, str], overrides: Sequence[str], **sections: Any
    ) -> None:
        """`folder`: contains the spec; `home`: where the engine's nodes find the store; `sections`: of the spec."""
        self.folder, self.home = folder, home
        self.overrides = [*ON_TWO_NODES, *overrides]
        folder.mkdir(exist_ok=True)
        small.write_corpus(folder)
        self.spec = small.write_spec(folder, **sections)
        empty_mlflow.place(home)
        self.environment = {**small.environment(home), "PYTHONPATH": str(ROOT), **environment}
        self.store = open_store((home / "store").as_uri())

    def holdfast(self, *arguments: str, code: int = 0) -> str:
        """The output of a command, which must exit with `code`."""
        command = [sys.executable, "-m", "holdfast.pipelines.cli", *arguments]
        result = warm.run(command, self.environment, self.folder, timeout=240)
        assert result.returncode == code, f"{result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    @property
    def sets(self) -> list[str]:
        """The overrides as arguments of a command."""
        return [argument for override in self.overrides for argument in ("--set", override)]

    def submit(self, *arguments: str) -> dict[str, Any]:
        """Submit the spec. Returns the command's JSON."""
        return dict(json.loads(self.holdfast("run", str(self.spec), *self.sets, "--json", *arguments)))

    def status(self, run: str) -> dict[str, Any]:
        """The JSON of `holdfast show`."""
        return dict(json.loads(self.holdfast("show", run, "--steps", "--json")))

    def step(self, run: str, name: str) -> dict[str, Any]:
        """A step in the status."""
        return next(dict(step) for step in self.status(run)["steps"] if step["name"] == name)

    def wait_for_step(self, run_id: str, step: int, seconds: float = 400) -> None:
        """Wait until a checkpoint of that step, or of a later one, is committed."""
        until(lambda: self.newest(run_id) >= step, seconds)

    def newest(self, run_id: str) -> int:
        """The step of the newest checkpoint; 0 for none."""
        files = (self.home / "store/runs" / run_id / "checkpoints").glob("step-*.json")
        return max((int(re.sub(r"\D", "", path.name)) for path in files), default=0)

    def digest(self, run_id: str, step: int) -> str:
        """The digest of the state at a step."""
        return read_manifest(self.store, run_id, step).state_digest

    def dataset(self, store: Path | None = None) -> tuple[str, dict[str, bytes]]:
        """The id of the only dataset of this or another store, and its files except the manifest."""
        (manifest,) = ((store or self.home / "store") / "datasets").glob("[0-9a-f]*/dataset.json")
        files = {path.name: path.read_bytes() for path in manifest.parent.iterdir() if path.name != manifest.name}
        return manifest.parent.name, files
