"""The DAG around a script in this process: a short managed run, its evaluation and its registration."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.code.resolve import publish_code
from holdfast.components.train.result import ScriptResult
from holdfast.components.train.script import _finish
from holdfast.pipelines.paths import load_spec
from holdfast.spec import Spec, run_id
from holdfast.store import Store
from holdfast.telemetry.run_metadata import write_run_metadata
from tests.script.launched import run_script

# A script has no part in these tests: `trained` runs the same steps in this process.
FILES = {
    "train.py": "import holdfast\n",
    "score.py": """
import json, os, sys
from pathlib import Path
from mine import load, size

scale = float(sys.argv[1])
model = load(Path(os.environ["HOLDFAST_EXPORT"]))
print("scoring", sorted(os.listdir(os.environ["HOLDFAST_EXPORT"])))
Path(os.environ["HOLDFAST_METRICS"]).write_text(json.dumps({"size": size(model) * scale, "parts": len(model)}))
""",
    "mine.py": """
from safetensors.numpy import load_file

def load(folder, *, file="model.safetensors"):
    return load_file(folder / file)

def size(model, *, scale=1.0):
    return float(sum((value**2).sum() for value in model.values())) * scale

class Model:
    def __init__(self, folder, *, scale=1.0):
        self.model, self.scale = load(folder), scale

    def predict(self, model_input):
        return [value * self.scale * float(self.model["weight"][0, 0]) for value in model_input["x"]]
""",
}


def write_spec(folder: Path, text: str, **files: str) -> Path:
    """Write the script, its files and a spec with `text` into `folder`. Returns the path of the spec."""
    folder.mkdir(exist_ok=True)
    for name, content in {**FILES, **files}.items():
        (folder / name).write_text(content)
    path = folder / "spec.yaml"
    path.write_text(f"name: scored\ntrain: {{script: train.py, determinism: exact}}\n{text}")
    return path


def trained(
    path: Path, store: Store, salt: str = "", *, weight: float = 2.0, export: Callable[..., object] | None = None
) -> tuple[Spec, ScriptResult]:
    """A finished run of the spec at `path`, whose model is one weight. The default export is its safetensors file."""
    spec = load_spec(path)
    publish_code(spec, store)
    identity = run_id(spec, "", salt)

    def script() -> None:
        session = holdfast.session(seed=1)
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(session.restore(model=model, optimizer=optimizer, steps=2), 2):
            session.step(step + 1, loss=float(model.weight.detach()))
        session.export(model if export is None else export)

    write_run_metadata(store, identity, spec, "", salt)
    run_script(store.url, identity, script)
    return spec, _finish(spec, identity, "", store)
