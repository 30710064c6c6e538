"""A step that was forked warm is what kfp.local would have started."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kfp import compiler, dsl

from holdfast.pipelines.backends.local import worker

OF_THE_SHELL = {"PWD", "OLDPWD", "SHLVL", "_"}


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def tell(folder: str, name: str) -> str:
    """Leave behind what a step knows of itself, and what runs after it."""
    import atexit
    import json
    import os
    import sys
    import threading
    from pathlib import Path

    import psutil

    def later() -> None:
        threading.main_thread().join()
        (Path(folder) / f"{name}.joined").touch()

    atexit.register((Path(folder) / f"{name}.exited").touch)
    threading.Thread(target=later).start()
    known = {
        "environment": dict(os.environ), "path": sys.path[1:], "folder": str(Path.cwd()), "group": os.getpgrp(),
        "command": psutil.Process().cmdline(),
    }  # fmt: skip
    (Path(folder) / f"{name}.json").write_text(json.dumps(known))
    print("told", name)
    return name


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def kill_the_server(after: str) -> None:
    """End what forks the steps, and so this one."""
    import os
    import signal

    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def leave(after: str) -> None:
    """Fail with a code of its own."""
    raise SystemExit(7)


def execute(folder: Path, pipeline: object) -> subprocess.CompletedProcess[str]:
    compiler.Compiler().compile(pipeline, str(folder / worker.PIPELINE))
    (folder / worker.ARGUMENTS).write_text(json.dumps({"folder": str(folder)}))
    command = [sys.executable, "-m", worker.__name__, str(folder)]
    reading, writing = os.pipe()  # the worker stops the steps when nobody holds the other end
    with os.fdopen(reading), os.fdopen(writing, "w"):
        return subprocess.run(command, stdin=reading, capture_output=True, text=True, check=False)


def test_a_step_starts_warm_and_without_the_server_as_kfp_does_it_and_both_are_the_same(tmp_path: Path) -> None:
    @dsl.pipeline(name="killed")
    def killed(folder: str) -> None:
        with dsl.ExitHandler(tell(folder=folder, name="cold")):
            kill_the_server(after=tell(folder=folder, name="warm").output)

    done = execute(tmp_path, killed)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "told warm" in done.stdout
    assert "told cold" in done.stdout
    warm, cold = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("warm", "cold"))
    assert warm.pop("command")[1:4] == ["-m", "holdfast.pipelines.backends.local.step", "tell"]
    assert "kfp.dsl.executor_main" in cold.pop("command")
    for known in (warm, cold):
        known["environment"] = {key: is_ for key, is_ in known["environment"].items() if key not in OF_THE_SHELL}
    assert warm == cold
    assert "OPENBLAS_NUM_THREADS" not in warm["environment"].keys() - os.environ.keys()
    assert {path.name for path in tmp_path.glob("*.[je][ox]i*ed")} == {
        f"{name}.{event}" for name in ("warm", "cold") for event in ("joined", "exited")
    }


def test_a_step_that_fails_fails_the_pipeline_and_no_server_stays(tmp_path: Path) -> None:
    @dsl.pipeline(name="failed")
    def failed(folder: str) -> None:
        leave(after=folder)

    done = execute(tmp_path, failed)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "SystemExit" not in done.stdout
