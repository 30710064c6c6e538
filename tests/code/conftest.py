"""A folder with functions of user code, and specs that name them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MINE = '''\
"""Functions of our own."""
import torch
import torch.nn.functional as F

def cues(data: bytes, name: str, *, skip: int = 0):
    for number, cue in enumerate(data.decode().split("\\n\\n")):
        if number >= skip:
            yield cue

def is_long(text: str) -> bool:
    return len(text) > 20

def focal(logits, targets, *, gamma: float = 2.0):
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses

def accuracy(model, batches):
    right = total = 0
    for tokens, targets, counted in batches:
        right += int(((model(tokens).argmax(-1) == targets) & counted).sum())
        total += int(counted.sum())
    return right / total

seen = []

def watch(step, metrics):
    seen.append((step, sorted(metrics)))
'''

MakeFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))


@pytest.fixture
def make_spec_file(tmp_path: Path) -> MakeFile:
    """Write a spec next to `mine.py`, with sections changed."""

    def make(code: str = MINE, **sections: Any) -> Path:
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(code, encoding="utf-8")
        tree = {"name": "test", "data": {"sources": [{"uri": "x"}]}, **sections}
        (folder / "spec.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return folder / "spec.yaml"

    return make
