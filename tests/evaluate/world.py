"""A small evaluation setup: a tokenizer, a dataset, models, and finished runs, in a store over a folder."""

import copy
import functools
import json
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from holdfast.dataset import Manifest, manifest
from holdfast.dataset.shards import DTYPES, block_digests, dtype_for, shard_digest
from holdfast.model.decoder import Decoder
from holdfast.model.export import token_id
from holdfast.model.initialise import initialise
from holdfast.spec import Spec, parse_spec
from holdfast.spec.model import Model
from holdfast.store import Store, layout
from holdfast.store.sequence import record_key
from tests.exports import write_export
from tests.model.exporting import write_hugging_face
from tests.model.tiny_model import END, TEXT, tokenizer_json
from tests.telemetry.histories import commit, write_segment

DATASET = "0123456789abcdef"
RUN = "00000000000000aa"
CHAMPION = "00000000000000bb"
STATE = "d" * 16


def spec(*overrides: str) -> Spec:
    text = "name: tiny\ndata: {sources: [{uri: corpus/*.txt}]}\nmodel: {layers: 2, hidden: 32, heads: 4, context: 32}"
    return parse_spec(text, ["training.steps=40", "evaluation.max_tokens=600", *overrides])


def documents(count: int = 40) -> list[str]:
    rng = random.Random(0)
    return ["\n".join(rng.choices(TEXT, k=rng.randint(1, 3))) for _ in range(count)]


def write_dataset(store: Store, texts: list[str] | None = None, vocabulary: int = 300, held_out: int = 20) -> Manifest:
    """Write a dataset of one source in the documented format. The last `held_out` texts are its validation split."""
    from tokenizers import Tokenizer

    raw = tokenizer_json(vocabulary)
    tokenizer, end = Tokenizer.from_str(raw), token_id(raw, END)
    texts = documents() if texts is None else texts
    splits = {}
    for name, part in (("train", texts[: len(texts) - held_out]), ("validation", texts[len(texts) - held_out :])):
        ids = [token for text in part for token in [*tokenizer.encode(text, add_special_tokens=False).ids, end]]
        shards: tuple[manifest.Shard, ...] = ()
        if ids:
            dtype = dtype_for(vocabulary)
            tokens = np.array(ids).astype(DTYPES[dtype])
            digests = block_digests(tokens.tobytes())
            shard = manifest.Shard(
                name=f"000-{name}-000000.tokens", tokens=len(tokens), digest=shard_digest(digests), dtype=dtype
            )
            store.put(layout.dataset(DATASET, shard.name), [tokens.tobytes(), digests])
            shards = (shard,)
        text_bytes = sum(len(text.encode()) for text in part)
        splits[name] = manifest.Split(tokens=len(ids), documents=len(part), text_bytes=text_bytes, shards=shards)
    store.put(layout.dataset(DATASET, "tokenizer.json"), raw.encode())
    document = Manifest(
        dataset_id=DATASET,
        tokenizer=manifest.Tokenizer(
            file="tokenizer.json",
            digest=blake3(raw.encode()).hexdigest(),
            vocabulary=vocabulary,
            end_of_text=END,
            end_of_text_id=end,
        ),
        sources=(
            manifest.Source(
                name="corpus",
                uri="corpus/*.txt",
                lineage=manifest.Lineage(
                    kind="files",
                    files=40,
                    bytes=4000,
                    digest="5" * 64,
                    left_out={"named pipe": manifest.LeftOut(count=2, example="corpus/pipe")},
                ),
                splits=splits,
                dropped={"duplicate": 3, "too_short": 0},
                examples={"duplicate": manifest.Example.of("corpus/a.txt", "repeats an earlier one", "to be")},
            ),
        ),
        settings={},
    )
    store.put(layout.dataset(DATASET), document.dump())
    return document


def shape(**changes: object) -> Model:
    return Model(**{"layers": 2, "hidden": 32, "heads": 4, "context": 32, **changes})


def trained(steps: int = 40, model: Model | None = None, seed: int = 0, vocabulary: int = 300) -> Decoder:
    """A model that learned a little from the dataset's text. More steps give a better model. A process trains each
    model once; every call returns a copy."""
    return copy.deepcopy(_trained(steps, model or shape(), seed, vocabulary))


@functools.cache
def _trained(steps: int, model: Model, seed: int, vocabulary: int) -> Decoder:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json(vocabulary))
    end = token_id(tokenizer_json(vocabulary), END)
    ids = [token for text in documents() for token in [*tokenizer.encode(text).ids, end]]
    decoder = Decoder.empty(model, vocabulary, end_of_text=end)
    initialise(decoder, seed)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    length = decoder.shape.context
    for step in range(steps):
        starts = [(step * 7 + row) * 13 % (len(ids) - length - 1) for row in range(8)]
        rows = torch.tensor([ids[start : start + length + 1] for start in starts])
        loss = decoder(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return decoder


def finish(store: Store, decoder: Decoder, run_id: str = RUN, **result: object) -> str:
    """Write the results of a finished training of `decoder`. Returns the prefix of the export."""
    with tempfile.TemporaryDirectory() as folder:
        names = write_hugging_face(
            Path(folder),
            decoder.shape,
            decoder.vocabulary,
            decoder.state_dict().items(),
            tokenizer_json=tokenizer_json(decoder.vocabulary),
            end_of_text=END,
        )
        state = str(result.get("state_digest", STATE))
        export, export_digest = write_export(store, run_id, 40, state, Path(folder), names)
    record = {
        "run_id": run_id,
        "dataset_id": DATASET,
        "step": 40,
        "loss": 3.0,
        "tokens": 40 * 32 * 32,
        "parameters": sum(parameter.numel() for parameter in decoder.parameters()),
        "checkpoint": layout.checkpoint(run_id, 40),
        "export": export,
        "export_digest": export_digest,
        "state_digest": STATE,
        "attempts": 2,
        "seconds": 95.5,
        **result,
    }
    store.put(layout.result(run_id), json.dumps(record).encode())
    return export


def write_history(
    store: Store, steps: int, attempts: int = 1, run_id: str = RUN, more: Mapping[str, float] | None = None
) -> None:
    """A realistic history: a falling, noisy loss, a warm-up, spikes, and `attempts` starts. `more` is in each row."""
    rng = random.Random(1)
    start_time, rows = 1_790_000_000.0, []
    starts = [round(index * steps / attempts) for index in range(attempts)]
    clock = start_time
    for step in range(1, steps + 1):
        if step - 1 in starts:
            number = starts.index(step - 1) + 1
            clock += 4.0
            claim = {"host": f"node-{number}", "pid": 100 + number, "claimed": clock - 3}
            store.put(record_key(layout.attempts(run_id), number), json.dumps(claim).encode())
        clock += 0.4
        progress = step / steps
        rows.append(
            {
                **(more or {}),
                "step": step,
                "time": clock,
                "loss": 2.1 + 6.2 * math.exp(-8 * progress) - 0.6 * progress + rng.gauss(0, 0.09),
                "grad_norm": 0.4 + 1.8 * math.exp(-6 * progress) + abs(rng.gauss(0, 0.08)) + (rng.random() < 0.004) * 2,
                "learning_rate": 1e-3 * (min(1, step / (0.05 * steps)) * (0.55 + 0.45 * math.cos(math.pi * progress))),
                "tokens": step * 8192,
                "tokens_per_second": 20480 * (1 + rng.gauss(0, 0.02)) * (0.4 if rng.random() < 0.01 else 1),
            }
        )
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], steps], strict=True), 1):
        write_segment(store, run_id, start, rows[start:end], number)
    commit(store, run_id, steps, [(start, number) for number, start in enumerate(starts, 1)])
