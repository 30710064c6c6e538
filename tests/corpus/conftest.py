"""A small corpus of every kind, and specs for it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.spec import Spec
from holdfast.store import Store, open_store

WORDS = [
    f"{a}{b}{c}" for a in ("ba", "ke", "lo", "mi", "su") for b in ("n", "r", "st", "") for c in ("a", "o", "é", "ing")
]

MakeSpec = Callable[..., Spec]


def prose(seed: int, words: int = 60) -> str:
    """Text that differs for every seed."""
    source = random.Random(seed)
    return f"# {seed}\n" + " ".join(
        source.choice(WORDS) + source.choice(["", ".", ",\n", "  ", "'s"]) for _ in range(words)
    )


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def make_spec() -> MakeSpec:
    def make(*uris: str | Path | dict[str, Any], **data: Any) -> Spec:
        sources = [uri if isinstance(uri, dict) else {"uri": str(uri)} for uri in uris]
        settings = {"tokenizer": {"vocabulary": 300}, "validation_fraction": 0.1, "workers": 1, **data}
        return Spec.model_validate({"name": "test", "data": {"sources": sources, **settings}})

    return make


def tree(store: Store, prefix: str) -> dict[str, bytes]:
    """All objects under a prefix."""
    return {info.key: store.get(info.key) for info in store.list(prefix)}
