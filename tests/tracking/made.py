"""A run without training: a spec, a dataset manifest and a history, written straight in the documented formats."""

from holdfast.dataset.manifest import Lineage, Manifest, Shard, Source, Split, Tokenizer
from holdfast.spec import Spec, parse_spec
from holdfast.store import Store, layout
from holdfast.telemetry import Row
from tests.telemetry.histories import write_committed

DATASET_ID = "0123456789abcdef"
RUN_ID = "fedcba9876543210"
OTHER = "1111222233334444"  # another run
KEYS = ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "system/cpu_percent")


def spec(*overrides: str) -> Spec:
    return parse_spec("name: story\ndata:\n  sources:\n    - uri: corpus/*.txt\n", overrides)


def write_dataset(store: Store) -> Manifest:
    split = Split(
        tokens=8,
        documents=1,
        text_bytes=8,
        shards=(Shard(name="0-train-0.tokens", tokens=8, digest="a" * 64, dtype="uint16"),),
    )
    tracked = Lineage(kind="dvc", files=1, bytes=9, digest="b" * 64, repository=".", revision="c" * 40, hash="d" * 32)
    manifest = Manifest(
        dataset_id=DATASET_ID,
        tokenizer=Tokenizer(
            file="tokenizer.json", digest="e" * 64, vocabulary=300, end_of_text="<|endoftext|>", end_of_text_id=0
        ),
        sources=(
            Source(
                name="corpus",
                uri="dvc:corpus",
                lineage=tracked,
                splits={"train": split, "validation": split},
                dropped={},
            ),
        ),
        settings={},
    )
    store.put(layout.dataset(DATASET_ID), manifest.dump())
    return manifest


def rows(first: int, last: int) -> list[Row]:
    return [
        {
            "step": step,
            "time": 1_700_000_000 + step / 3,
            "loss": 10.0 / step,
            "grad_norm": 0.1 * step,
            "learning_rate": 1e-3 / step,
            "tokens": 4096 * step,
            "tokens_per_second": 1234.5,
            "system.cpu_percent": 99.5,
        }
        for step in range(first, last + 1)
    ]


def write_history(store: Store, after: int, upto: int) -> None:
    write_committed(store, RUN_ID, after, rows(after + 1, upto))
