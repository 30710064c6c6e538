"""A run of generated answers, small enough for many repetitions: prompts of one letter for the model of `tiny_run`."""

import json
import signal
from pathlib import Path

import numpy as np

from holdfast.code.closure import role_digest, source_text
from holdfast.dataset.vocabulary import ENDS, RECORD, UNCOUNTED
from holdfast.spec import Spec
from holdfast.store import Store
from tests.train.ranks import Runs
from tests.train.tiny_run import tiny_spec, write_dataset

PROMPTS = 12
FIELDS = (
    "data.kind=prompts", "data.document_masks=true", "data.tokenizer.kind=file", "data.tokenizer.path=t",
    'training.grpo.rewards=[{kind: regex, weight: 0.5}, {kind: exact, timeout_seconds: 20}]',
    "training.grpo.group=4", "training.grpo.lot=2", "training.grpo.answer_tokens=6", "training.global_batch=16",
    "training.micro_batch=4", "training.steps=4", "checkpoint.every_steps=2", "training.schedule.warmup_steps=0",
)  # fmt: skip


def prompt_spec(*overrides: str) -> Spec:
    """The spec with overrides, as on the command line."""
    return tiny_spec(*FIELDS, *overrides)


def prompt_words(last: int = 3) -> np.ndarray:
    """The words of all prompts: 1 to 3 tokens, of the last one `last`, and their record."""
    words: list[int] = []
    for number in range(PROMPTS):
        tokens = [60 + number] * (1 + number % 3 if number < PROMPTS - 1 else last)
        record = {"prompt": chr(65 + number), "answer": "x", "pattern": "[a-m]"}
        raw = json.dumps(record).encode()
        document = [token | UNCOUNTED for token in tokens] + [byte | RECORD | UNCOUNTED for byte in raw]
        document[-1] |= ENDS
        words += document
    return np.array(words)


def write_prompts(store: Store) -> str:
    """Write the dataset, and return its id."""
    return write_dataset(store, packed=prompt_words(), kind="prompts", text="")


MINE = """\
def reply(record, turns):
    return None if len(turns) > 3 else record["prompt"]
"""


def turns_fields(folder: Path) -> tuple[str, ...]:
    """The overrides of a run with an environment, whose file this writes into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    digest = role_digest({"mine.py": source_text(MINE.encode())}, "mine.py:reply")
    environment = f'{{use: "mine.py:reply", digest: "{digest}", turn_tokens: 2, timeout_seconds: 60}}'
    return (f"training.grpo.environment={environment}", "training.grpo.answer_tokens=9")


def train_with_code(rank: int, size: int, url: str, folder: Path, runs: Runs, code: Path) -> list[str]:
    """Train runs, as a rank, with the functions of the folder `code`. These ranks have no command line to compare."""
    from holdfast.code import resolve
    from holdfast.rank import worker
    from tests.train import ranks

    worker.require_functions = lambda *_: None

    resolve._entered[:] = [code]
    return ranks._train_all(rank, size, url, folder, runs, False, signal.SIGTERM)
