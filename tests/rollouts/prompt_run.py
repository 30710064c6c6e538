"""A run of generated answers, small enough for many repetitions: prompts of one letter for the model of `tiny_run`."""

from __future__ import annotations

import json

import numpy as np

from holdfast.dataset.vocabulary import ENDS, RECORD, UNCOUNTED
from holdfast.spec import Spec
from holdfast.store import Store
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


def prompt_words() -> np.ndarray:
    """The words of all prompts: 1 to 3 tokens, and their record."""
    words: list[int] = []
    for number in range(PROMPTS):
        tokens = [60 + number] * (1 + number % 3)
        record = {"prompt": chr(65 + number), "answer": "x", "pattern": "[a-m]"}
        raw = json.dumps(record).encode()
        document = [token | UNCOUNTED for token in tokens] + [byte | RECORD | UNCOUNTED for byte in raw]
        document[-1] |= ENDS
        words += document
    return np.array(words)


def write_prompts(store: Store) -> str:
    """Write the dataset, and return its id."""
    return write_dataset(store, packed=prompt_words(), kind="prompts", text="")
