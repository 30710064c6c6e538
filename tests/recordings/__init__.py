"""Replies of real servers, as facts for tests. `kfp/README.md` describes each recording."""

import json
from pathlib import Path
from typing import Any

KFP = Path(__file__).parent / "kfp"


def recorded_run(name: str) -> dict[str, Any]:
    """The reply of a KFP server to `GET /apis/v2beta1/runs/{id}`, recorded in `kfp/<name>.json`."""
    return dict(json.loads((KFP / f"{name}.json").read_bytes()))


def missing_log() -> dict[str, str]:
    """The reply of KFP's log endpoint, with status 200, if it has no log."""
    *_, body = (KFP / "log-of-a-missing-pod.http").read_text().splitlines()
    return dict(json.loads(body))
