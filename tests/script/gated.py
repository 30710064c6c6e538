"""Examples of scripts and functions that wait at a step, and their runs on a backend of two nodes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint import list_attempts, read_manifest
from holdfast.launch.launches import newest_launch
from holdfast.store import open_store
from tests.whole import small
from tests.whole.submitting import Submitter, until

if TYPE_CHECKING:
    from tests.ray.place import Place as RayPlace
    from tests.slurm.chain import Place as SlurmPlace

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "scripts"
VARIABLE = "HOLDFAST_TEST_GATE"
GATE = f"""import os, pathlib, time
from holdfast.script.session import ManagedSession

inner, file = ManagedSession.step, os.environ.get({VARIABLE!r})


def step(self, done, **metrics):
    inner(self, done, **metrics)
    while file and done >= int(pathlib.Path(file).read_text()):
        time.sleep(0.02)


ManagedSession.step = step
"""


def write_example(folder: Path, name: str) -> Path:
    """Copy an example to `folder` and have it wait at a gate. Returns its spec."""
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (folder / "gate.py").write_text(GATE)
    script = folder / "train.py"
    docstring, rest = script.read_text().split('"""\n', 1)
    script.write_text(f'{docstring}"""\nimport gate\n{rest}')
    return folder / "spec.yaml"


class Gate:
    """The step after which ranks wait, in a file of the folder."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "gate"
        self.open_until(step)

    @property
    def environment(self) -> dict[str, str]:
        """The variable that names the file."""
        return {VARIABLE: str(self.file)}

    def open_until(self, step: int) -> None:
        """Let the ranks go on until they have done this step."""
        new = self.file.with_name("gate.new")
        new.write_text(str(step))
        new.rename(self.file)

    def open(self) -> None:
        """Let the ranks go on to their end."""
        self.open_until(sys.maxsize)


class Script:
    """The bare loop of the examples on a backend of two nodes."""

    steps = 40

    def __init__(self, place: Submitter) -> None:
        """Have `place` submit it. Its ranks wait after step 25 until `gate` opens."""
        self.gate = Gate(place.folder, 25)
        place.spec = write_example(place.folder / "code", "loop")
        place.overrides = [*_general(place), f"cluster.environment={_variables(self.gate.environment)}"]
        place.overrides += ["parallel.processes=1", f'train.arguments=["{self.steps}"]', "checkpoint.grace_seconds=5"]
        place.overrides += ["train.verify_steps=0"]
        self.local = ["train.verify_steps=0", "parallel.processes=2", f'train.arguments=["{self.steps}"]']

    def open(self) -> None:
        """Let the ranks go on to their end."""
        self.gate.open()


class Plugins:
    """The example of functions in a spec on a backend of two nodes."""

    steps = 40

    def __init__(self, place: Submitter) -> None:
        """Have `place` submit it. Its ranks wait before step 25 until `open` is called."""
        self._folder = place.folder / "plugins"
        shutil.copytree(ROOT / "examples/plugins", self._folder, ignore=shutil.ignore_patterns("__pycache__"))
        place.spec = self._folder / "plugins.yaml"
        text = place.spec.read_text().replace("examples/plugins/talks", f"{self._folder}/talks")
        place.spec.write_text(text)
        variables = small.held(self._folder, 25)
        place.overrides = [*_general(place), f"cluster.environment={_variables(variables)}"]
        place.overrides += ["training.micro_batch=2", "checkpoint.grace_seconds=5"]
        # The champion of that name has its registration in the other store.
        self.local = ["parallel.processes=2", "training.micro_batch=2", "registration.model=calm"]

    def open(self) -> None:
        """Let the ranks go on to their end."""
        small.hold(self._folder, sys.maxsize)


def _general(place: Submitter) -> list[str]:
    return [one for one in place.overrides if not one.startswith(("training.", "data.", "cluster.environment="))]


def _variables(given: dict[str, str]) -> str:
    return json.dumps({"GLOO_SOCKET_IFNAME": "lo", **given})


def ends_like_a_local_run(
    place: RayPlace | SlurmPlace, code: Script | Plugins, strike: Callable[[str], object]
) -> None:
    """Submit, have `strike` take the ranks of the run away once step 20 is saved, and compare the result with that of
    an undisturbed run on this machine."""
    run = str(place.submit()["run_id"])
    place.wait_for_step(run, 20)
    launch = newest_launch(place.store, run)
    strike(run)
    until(lambda: newest_launch(place.store, run) > launch, 400)
    code.open()
    status = place.wait(run)
    assert status["state"] == "SUCCEEDED", f"{status}\n{place.logs(run)}"
    sets = [argument for override in code.local for argument in ("--set", override)]
    calm = small.holdfast(place.folder, str(place.spec), *sets, "--store", str(place.folder / "calm"))
    assert calm.returncode == 0, calm.stdout + calm.stderr
    calm_store = open_store((place.folder / "calm").as_uri())
    assert place.digest(run, code.steps) == read_manifest(calm_store, run, code.steps).state_digest
    assert len(list_attempts(place.store, run)) >= 2
    assert place.submit()["created"] is False
