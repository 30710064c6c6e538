"""A run small enough for many repetitions: a two-layer model on a synthetic dataset, and functions to start it."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
from blake3 import blake3

from holdfast.dataset import manifest
from holdfast.dataset.shards import DTYPES, block_digests, shard_digest
from holdfast.engines.assignment import Assignment
from holdfast.spec import Spec, dump_spec, parse_spec
from holdfast.store import Store, layout, open_store
from tests import empty_mlflow, warm

DATASET_ID = "0123456789abcdef"
VOCABULARY = 300
SECOND_SOURCE = 77  # the token of a second source
END_OF_TEXT = "<|endoftext|>"

SPEC = """
name: tiny
data: {sources: [{uri: synthetic}]}
model: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, context: 16}
training:
  steps: 12
  global_batch: 8
  micro_batch: 2
  log_every: 1
  optimizer: {learning_rate: 0.01}
  schedule: {warmup_steps: 2}
checkpoint: {every_steps: 3, keep_last: 2}
cluster: {restarts: {backoff_seconds: 0}}
"""


def tiny_spec(*overrides: str) -> Spec:
    """The spec with overrides, as on the command line."""
    return parse_spec(SPEC, overrides)


def tiny_assignment(*overrides: str) -> Assignment:
    """The assignment of the run's ranks."""
    return Assignment.of(tiny_spec(*overrides), "run", DATASET_ID)


def write_dataset(
    store: Store,
    tokens: int = 4000,
    sources: int = 1,
    packed: np.ndarray | None = None,
    held_out: np.ndarray | None = None,
    **chat: str,
) -> str:
    """Write the dataset: text with a pattern that a model can learn, and optionally a second source that repeats one
    token. Alternatively, `packed` tokens with their marks, of the kind that `chat` names. The held-out data is
    `held_out`, or equals the training data. Returns its id.
    """
    rng = np.random.default_rng(7)
    pattern = np.cumsum(rng.integers(1, 4, tokens)) % VOCABULARY
    tokenizer = _tokenizer()
    store.put(layout.dataset(DATASET_ID, "tokenizer.json"), tokenizer)
    texts = (pattern, np.full(tokens, SECOND_SOURCE))[:sources] if packed is None else (packed,)
    dtype: manifest.DtypeName = "uint16" if packed is None else "uint32"
    whole = manifest.Manifest(
        dataset_id=DATASET_ID,
        tokenizer=manifest.Tokenizer(
            file="tokenizer.json",
            digest=blake3(tokenizer).hexdigest(),
            vocabulary=VOCABULARY,
            end_of_text=END_OF_TEXT,
            end_of_text_id=0,
        ),
        sources=tuple(_write_source(store, number, text, dtype, held_out) for number, text in enumerate(texts)),
        settings={} if packed is None else {"chat": {"packed": 16, **chat}},
    )
    store.put(layout.dataset(DATASET_ID), whole.dump())
    return DATASET_ID


def _write_source(
    store: Store, number: int, text: np.ndarray, dtype: manifest.DtypeName, held_out: np.ndarray | None
) -> manifest.Source:
    train = _write_split(store, f"train-{number}.tokens", text, dtype)
    # By default the held-out data equals the training data, because no test measures the quality of a model.
    validation = train if held_out is None else _write_split(store, f"validation-{number}.tokens", held_out, dtype)
    name = "synthetic" if number == 0 else f"synthetic-{number}"
    return manifest.Source(
        name=name,
        uri=name,
        lineage=manifest.Lineage(kind="files", files=1, bytes=len(text), digest="0" * 64),
        splits={"train": train, "validation": validation},
        dropped={},
    )


def _write_split(store: Store, name: str, text: np.ndarray, dtype: manifest.DtypeName) -> manifest.Split:
    if not len(text):
        return manifest.Split(tokens=0, documents=0, text_bytes=0, shards=())
    ids = text.astype(DTYPES[dtype])
    digests = block_digests(ids.tobytes())
    shard = manifest.Shard(name=name, tokens=len(ids), digest=shard_digest(digests), dtype=dtype)
    store.put(layout.dataset(DATASET_ID, name), [ids.tobytes(), digests])
    return manifest.Split(tokens=len(ids), documents=1, text_bytes=len(ids), shards=(shard,))


def _tokenizer() -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END_OF_TEXT: 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    vocabulary |= {f"word{index}": index for index in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str().encode()


PIPE_FILE = "events"


def start_training(
    spec: Spec,
    store_url: str,
    home: Path,
    salt: str = "",
    environment: dict[str, str] | None = None,
    *,
    replan: bool = False,
    module: str = "holdfast.components.train",
) -> subprocess.Popen[str]:
    """Start `python -m holdfast.components.train`, or another `module`, on the dataset, as a person or Argo would. Its
    events and its ranks' events go to `home / PIPE_FILE`.
    """
    empty_mlflow.place(home)
    (home / PIPE_FILE).unlink(missing_ok=True)
    path = home / f"spec{salt}.yaml"
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(dump_spec(spec))
    unfinished.rename(path)  # another training may be reading it
    command = [sys.executable, "-m", module, "--spec", str(path), "--dataset-id", DATASET_ID]
    command += ["--store", store_url, "--salt", salt, *(["--replan"] if replan else [])]
    return warm.popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "HOLDFAST_HOME": str(home),
            "HOLDFAST_EVENTS": str(home / PIPE_FILE),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
    )


def train_once(spec: Spec, store_url: str, home: Path, salt: str = "", seconds: float = 300.0) -> str:
    """Train to the end and return the output. Fails the test if the step fails."""
    process = start_training(spec, store_url, home, salt)
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def new_store(folder: Path) -> Store:
    """A folder store with the dataset."""
    store = open_store(f"file://{folder}")
    write_dataset(store)
    return store
