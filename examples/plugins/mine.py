"""Functions of our own. Nothing here imports Holdfast, and the file runs anywhere."""

import torch
import torch.nn.functional as F


def subtitles(data: bytes, name: str):  # noqa: ARG001 - the name of the file is given, too
    """Reader: the bytes of one .srt file -> its texts. Its source is in the dataset id."""
    for cue in data.decode("utf-8-sig").split("\n\n"):
        lines = cue.strip().splitlines()[2:]  # after the number and the times
        if lines:
            yield " ".join(lines)


def is_speech(text: str, *, words: int = 2) -> bool:
    """Filter: whether a text is kept. Its source is in the dataset id."""
    return not text.startswith("[") and len(text.split()) >= words


def focal(logits, targets, *, gamma: float = 2.0):
    """Objective: logits [n, vocabulary] and targets [n] -> n losses. Its source is in the run id."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


def accuracy(model, batches):
    """Metric: the model and batches of held-out text -> a number. Its source is in the key of the verdict."""
    right = total = 0
    for tokens, targets, counted in batches:
        hits = (model(tokens).argmax(-1) == targets) & counted
        right, total = right + int(hits.sum()), total + int(counted.sum())
    return right / max(1, total)


def show(step: int, metrics: dict):
    """Observer: called after each step with its metrics. It is in no identity."""
    if step % 20 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}")
