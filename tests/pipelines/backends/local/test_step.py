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


def execute(folder: Path, pipeline: object, log: Path | None = None) -> subprocess.CompletedProcess[str]:
    compiler.Compiler().compile(pipeline, str(folder / worker.PIPELINE))
    (folder / worker.ARGUMENTS).write_text(json.dumps({"folder": str(folder)}))
    command = [sys.executable, "-m", worker.__name__, str(folder)]
    reading, writing = os.pipe()  # the worker stops the steps when nobody holds the other end
    with os.fdopen(reading), os.fdopen(writing, "w"):
        if log is None:
            return subprocess.run(command, stdin=reading, capture_output=True, text=True, check=False)
        with log.open("w") as output:
            return subprocess.run(
                command, stdin=reading, stdout=output, stderr=subprocess.STDOUT, text=True, check=False
            )


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


def test_a_log_that_a_full_disk_does_not_take_costs_no_step(tmp_path: Path) -> None:
    @dsl.pipeline(name="untold")
    def untold(folder: str) -> None:
        tell(folder=folder, name=tell(folder=folder, name="first").output)

    assert execute(tmp_path, untold, Path("/dev/full")).returncode == 0
    assert (tmp_path / "first.exited").exists()


def test_where_a_log_has_a_hole_it_says_so(tmp_path: Path) -> None:
    """What is written to it is written again once there is space."""
    with (tmp_path / "log").open("w") as log, Path("/dev/full").open("w") as full:
        descriptor = os.dup(log.fileno())
        printed = worker.unfailing(descriptor)
        for line, place in (("one", log), ("two", full), ("three", full), ("four", log), ("five", log)):
            os.dup2(place.fileno(), descriptor)
            print(line, file=printed)
        os.close(descriptor)
    missing = f"[{len('two') + len('three') + 2} bytes are missing here: there was no space left]"
    assert (tmp_path / "log").read_text().split("\n") == ["one", missing, "four", "five", ""]
