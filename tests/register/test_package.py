"""The packaged model loads and generates through MLflow, with its bundled code and without a pickle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest
import requests

from holdfast.components.register import run
from holdfast.components.register.publish import describe_model, requirements
from holdfast.model.exported import read_record
from holdfast.model.generate import generate
from holdfast.model.hugging_face import load_exported
from holdfast.store import Store
from tests.ports import free_port
from tests.register.conftest import EXPORT, Finish
from tests.tracking import made

PROMPTS = ["def add(", "the quick"]
PARAMETERS = {"max_tokens": 12, "temperature": 0.9, "seed": 7}


def packed(store: Store, folder: Path) -> Path:
    """The whole model as MLflow downloads it."""
    record = read_record(store, EXPORT)
    describe_model(folder, record, f"{store.url}/{EXPORT}")
    for name in record.files:
        store.download(EXPORT + name, folder / name)
    return folder


def expected(store: Store) -> list[str]:
    config = store.local_path(EXPORT + "config.json")
    assert config is not None
    decoder, tokenizer = load_exported(config.parent)
    return [generate(decoder, tokenizer, prompt, tokens=12, temperature=0.9, seed=7) for prompt in PROMPTS]


def test_the_registered_model_gives_the_same_output_as_the_export(
    home: Path, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    run(made.spec(), made.RUN_ID, store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    model = mlflow.pyfunc.load_model("models:/story@champion")
    assert model.predict(pd.DataFrame({"prompt": PROMPTS}), params=PARAMETERS) == expected(store)
    assert model.predict({"prompt": PROMPTS}, params=PARAMETERS) == expected(store)
    assert len(model.predict(model.input_example)) == 1
    names = [parameter.name for parameter in model.metadata.signature.params]
    assert names == ["max_tokens", "temperature", "seed"]


def test_a_model_whose_weights_were_changed_is_not_loaded(
    home: Path, store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish()
    registered = run(made.spec(), made.RUN_ID, store)
    key = EXPORT + "model.safetensors"
    weights = bytearray(store.get(key))
    weights[-3] ^= 0x40
    store.put(key, bytes(weights))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
    with pytest.raises(Exception, match=r"model.safetensors: bytes 0 to \d+ are not those that were exported"):
        mlflow.pyfunc.load_model(registered.uri)


def test_the_folder_holds_no_pickle_and_no_path_of_this_machine(
    home: Path, store: Store, finish: Finish, tmp_path: Path
) -> None:
    finish()
    folder = packed(store, tmp_path / "work")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".pt", ".bin", ".pyc")]
    mlmodel = (folder / "MLmodel").read_text(encoding="utf-8")
    assert "model_code_path: serving.py" in mlmodel
    assert str(tmp_path / "work") not in mlmodel
    assert str(Path.cwd()) not in mlmodel
    packages = (folder / "requirements.txt").read_text(encoding="utf-8").split()
    assert packages == requirements()
    assert all("==" in line and "+" not in line for line in packages)


@pytest.mark.slow
def test_a_process_without_the_repository_loads_the_packed_code(
    home: Path, store: Store, finish: Finish, tmp_path: Path
) -> None:
    finish()
    folder = packed(store, tmp_path / "work")
    code = f"""if True:
        import sys
        sys.path += {[path for path in sys.path if path.endswith("site-packages")]!r}  # the libraries, and no .pth
        try:
            import holdfast
            raise SystemExit(f"it is installed: {{holdfast.__file__}}")
        except ModuleNotFoundError:
            pass
        import json, mlflow
        model = mlflow.pyfunc.load_model({str(folder)!r})
        answer = model.predict({{"prompt": {PROMPTS!r}}}, params={PARAMETERS!r})
        import holdfast
        print(json.dumps([holdfast.__file__, answer]))
    """
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    place, outputs = json.loads(process.stdout.splitlines()[-1])
    assert Path(place).is_relative_to(folder)
    assert outputs == expected(store)


def answers(session: requests.Session, url: str) -> bool:
    """Whether a healthy server listens there."""
    try:
        return session.get(url, timeout=120).ok
    except requests.ConnectionError:
        return False


@pytest.mark.drill
def test_mlflow_models_serve_answers_prompts_with_the_packed_code(
    home: Path, store: Store, finish: Finish, tmp_path: Path
) -> None:
    finish()
    folder = packed(store, tmp_path / "work")
    marker = folder / "code" / "holdfast" / "model" / "generate.py"
    marker.write_text(
        marker.read_text().replace("def generate(", "print('packed code', flush=True)\n\n\ndef generate(")
    )
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
    with (tmp_path / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    try:
        with requests.Session() as session:
            while not answers(session, f"http://127.0.0.1:{port}/ping"):  # the test's time limit bounds this loop
                assert server.poll() is None, (tmp_path / "serve.log").read_text()
                time.sleep(0.1)
            for body in ({"inputs": {"prompt": PROMPTS}}, {"dataframe_records": [{"prompt": p} for p in PROMPTS]}):
                answer = session.post(
                    f"http://127.0.0.1:{port}/invocations", json={**body, "params": PARAMETERS}, timeout=240
                )
                assert json.loads(answer.text) == {"predictions": expected(store)}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert "packed code" in (tmp_path / "serve.log").read_text()
