"""`python -m tests.whole.kfp_local FOLDER`: the compiled pipeline in `kfp.local`, KFP's own runner.

FOLDER has `pipeline.yaml` and `arguments.json`; the outcomes of the steps are written to `outcomes` in it. Fields for
pods are left out: their variables, the waits between retries, and the tasks that only enter artifacts for a UI.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from holdfast.runtime.environment import OUTCOMES
from holdfast.steps import ARTIFACTS


def for_one_machine(pipeline: dict[str, Any]) -> dict[str, Any]:
    """A compiled pipeline without the fields for pods."""
    components = pipeline["components"]
    entering = {
        name for name, component in components.items() if ARTIFACTS in component.get("dag", {}).get("tasks", {})
    }
    nodes: list[object] = [pipeline]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            node.pop("retryPolicy", None)
            tasks = node.get("tasks")
            for name, task in list(tasks.items()) if isinstance(tasks, dict) else ():  # a spec has a list of that name
                if task["componentRef"]["name"] in entering:
                    del node["tasks"][name]
            if "image" in node:  # a container
                node.pop("env", None)
            nodes.extend(node.values())
    return pipeline


def main(folder: Path) -> int:
    """Run the pipeline; returns 1 when it fails."""
    from kfp import components, local

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # about an image whose name does not contain `python`
    os.environ[OUTCOMES] = str(folder / "outcomes")
    (folder / "outcomes").mkdir(exist_ok=True)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "artifacts"), workspace_root=str(folder / "workspace"),
    )  # fmt: skip
    pipeline = for_one_machine(next(yaml.safe_load_all((folder / "pipeline.yaml").read_text())))
    try:
        components.load_component_from_text(yaml.safe_dump(pipeline))(
            **json.loads((folder / "arguments.json").read_bytes())
        )
    except RuntimeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
