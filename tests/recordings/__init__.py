"""What real servers answered: facts to test against. `kfp/README.md` says what each recording is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KFP = Path(__file__).parent / "kfp"


def recorded_run(name: str) -> dict[str, Any]:
    """The answer of a KFP server to `GET /apis/v2beta1/runs/{id}`, as it was recorded in `kfp/<name>.json`."""
    return dict(json.loads((KFP / f"{name}.json").read_bytes()))


def missing_log() -> dict[str, str]:
    """What KFP's log endpoint answers with status 200 when it has no log."""
    *_, body = (KFP / "log-of-a-missing-pod.http").read_text().splitlines()
    return dict(json.loads(body))
