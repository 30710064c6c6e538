"""A training script, and functions of a user, in the emitted templates: killed, and resumed with the same bits."""

import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint import list_attempts, read_manifest
from holdfast.pipelines.backends.argo import argo_objects
from holdfast.pipelines.paths import load_spec, with_absolute_paths
from holdfast.store import open_store
from tests.pipelines.backends.argo.emulator import Argo, Workflow
from tests.script.gated import Plugins, Script
from tests.seeds import in_full
from tests.whole import small
from tests.whole.submitting import Submitter, until

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("code", [Script, pytest.param(Plugins, marks=in_full)])
def test_code_of_a_user_whose_pod_is_killed_ends_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: type[Script] | type[Plugins]
) -> None:
    place = Submitter(tmp_path, tmp_path / "home", {"HOLDFAST_LAUNCHER": "local"}, [])
    kind = code(place)
    monkeypatch.setenv("HOLDFAST_HOME", str(place.home))
    (variables,) = (one for one in place.overrides if one.startswith("cluster.environment="))
    spec = with_absolute_paths(load_spec(place.spec, [*kind.local, variables]))
    namespace = Argo(argo_objects(spec), tmp_path / "pods", place.environment)
    ended: list[Workflow] = []
    template = {"workflowTemplateRef": {"name": f"holdfast-{spec.name}"}}
    thread = threading.Thread(target=lambda: ended.append(namespace.submit(template)))
    thread.start()
    run = until(lambda: next((path.name for path in (place.home / "store/runs").glob("[0-9a-f]*")), ""), 300)
    place.wait_for_step(run, 20)
    for process in _pods(place.home, "train"):
        process.kill()
    until(lambda: len(list_attempts(place.store, run)) == 2, 300)
    kind.open()
    thread.join()
    (workflow,) = ended
    assert workflow.phase == "Succeeded", workflow.log
    assert workflow.nodes["train"].codes[-2:] == [137, 0]
    calm = small.holdfast(tmp_path, str(place.spec), *(f"--set={one}" for one in kind.local), "--store", "calm")
    assert calm.returncode == 0, calm.stdout + calm.stderr
    calm_store = open_store((tmp_path / "calm").as_uri())
    assert place.digest(run, kind.steps) == read_manifest(calm_store, run, kind.steps).state_digest


def _pods(home: Path, step: str) -> list[psutil.Process]:
    """The processes of a step."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if f"holdfast.components.{step}" in process.cmdline() and process.environ()["HOLDFAST_HOME"] == str(home):
                found.append(process)
    return found
