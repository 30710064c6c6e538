"""MLflow's UI, as `holdfast ui` serves it."""

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.view.ui import password_of
from holdfast.spec.errors import AccessDeniedError, ExitCode, HoldfastError
from holdfast.store import open_store
from holdfast.tracking import champion, connect, require_usable
from tests import empty_mlflow
from tests.tracking import made

WRITES = (  # requests that make another model the champion
    ("DELETE", "/registered-models/alias", {"name": "story", "alias": "champion"}),
    ("POST", "/registered-models/alias", {"name": "story", "alias": "champion", "version": "1"}),
    ("POST", "/model-versions/create", {"name": "story", "source": "file:///tmp/x"}),
    ("POST", "/experiments/create", {"name": "x", "artifact_location": "file:///"}),
    ("POST", "/runs/create", {"experiment_id": "0"}),
)


def get(url: str, password: str = "", method: str = "GET", body: object = None) -> tuple[int, bytes]:
    """The status and the body of an answer to a request with the password."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    if password:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"holdfast:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=240) as page:
            return page.status, page.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


@pytest.mark.slow
def test_the_ui_requires_its_password_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_mlflow.place(tmp_path)
    database = f"sqlite:///{(tmp_path / 'mlflow.db').rename(tmp_path / 'a-secret-name.db')}"
    environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path), "MLFLOW_TRACKING_URI": database}
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "ui", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("MLflow: "))
        url, file = line.split()[1], tmp_path / "mlflow-ui.password"
        assert str(file) in line
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        password = file.read_text().strip()
        for path in ("/", "/api/2.0/mlflow/registered-models/search?max_results=5", "/get-artifact?run_uuid=x&path=y"):
            assert get(url + path)[0] == 401
            assert get(url + path, "wrong")[0] == 401
        api = url.rstrip("/") + "/api/2.0/mlflow"
        for method, path, body in WRITES:
            assert get(api + path, method=method, body=body)[0] == 401
            assert get(api + path, "wrong", method, body)[0] == 401
        status, page = get(url, password)
        assert (status, b"MLflow" in page) == (200, True)
        family = psutil.Process(process.pid).children(recursive=True)
        command_lines = " ".join(" ".join(member.cmdline()) for member in family)
        assert "a-secret-name" not in command_lines
        assert password not in command_lines
        # Clients of an MLflow server send the password where there is one.
        monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        store = open_store(f"file://{tmp_path / 'store'}")
        for ask in (lambda: champion("story", store), lambda: require_usable(made.spec())):
            with pytest.raises(HoldfastError, match="MLFLOW_TRACKING_USERNAME") as error:
                ask()
            assert error.value.exit_code == ExitCode.ACCESS_DENIED
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "holdfast")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        require_usable(made.spec())
        assert champion("story", store) is None
        connect().create_registered_model("story")
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    gone, alive = psutil.wait_procs(family, timeout=240)
    assert gone
    assert not alive


def test_a_password_file_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    first = password_of(file)
    assert len(first) > 20
    assert password_of(file) == first
    file.chmod(0o640)
    with pytest.raises(AccessDeniedError, match="only you can read"):
        password_of(file)
    file.unlink()
    (tmp_path / "elsewhere").write_text("known\n")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AccessDeniedError, match="only you can read"):
        password_of(file)


def test_an_occupied_port_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {**os.environ, "HOLDFAST_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "holdfast.pipelines.cli", "ui", "--port", port]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert port in result.stderr
    assert "--port 0" in result.stderr
