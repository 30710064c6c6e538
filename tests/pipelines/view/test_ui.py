"""MLflow's UI, as `holdfast ui` serves it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil


def test_the_ui_answers_where_it_says_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "ui", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("MLflow: "))
        with urllib.request.urlopen(line.split()[1], timeout=240) as page:
            assert b"MLflow" in page.read()
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    gone, alive = psutil.wait_procs(family, timeout=240)
    assert gone
    assert not alive


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "holdfast.pipelines.cli", "ui", "--port", port]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert port in done.stderr
    assert "--port 0" in done.stderr
