"""The batch of a step as shown to a user: every token comes from the named file and line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from holdfast.corpus import prepare, units
from holdfast.corpus.batch import batch_of
from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.spec import Spec
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose, write_jsonl
from tests.corpus.test_chat import make_chat, question

__all__ = ["make_chat"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))


def text_of(where: str) -> str:
    """The text at the place that a passage names."""
    name, _, at = where.partition(": row ")
    if at:
        import pyarrow.parquet as pq

        return str(pq.read_table(name).column("text")[int(at) - 1].as_py())
    name, _, line = where.rpartition(":") if ".jsonl" in where else (where, "", "")
    if not line:
        return Path(where).read_text(encoding="utf-8")
    raw = gzip.decompress(Path(name).read_bytes()) if name.endswith(".gz") else Path(name).read_bytes()
    return str(json.loads(raw.split(b"\n")[int(line) - 1])["text"])


def test_every_token_of_a_batch_is_in_the_reported_file_and_line(
    store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 12_000)  # a file has several units, and a unit has several files
    monkeypatch.setattr(units, "PART_BYTES", 3_000)
    import pyarrow as pa
    import pyarrow.parquet as pq

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number:03d}.txt").write_text(prose(number % 30), encoding="utf-8")  # ten texts occur twice
    broken = "not json\n\n" + write_jsonl(corpus / "long.jsonl", [prose(100 + at) for at in range(60)]).read_text()
    (corpus / "long.jsonl").write_text("\n".join(["", *broken.splitlines()]) + "\n")
    small = write_jsonl(tmp_path / "small.jsonl", [prose(200 + at % 20) for at in range(40)])
    (corpus / "small.jsonl.gz").write_bytes(gzip.compress(small.read_bytes()))
    pq.write_table(
        pa.table({"text": [prose(300 + at) for at in range(30)]}), corpus / "table.parquet", row_group_size=7
    )
    base = make_spec(
        corpus / "*.txt", corpus / "long.jsonl", corpus / "small.jsonl.gz", corpus / "table.parquet",
        cleaning={"on_bad_record": "skip"},
    )  # fmt: skip
    spec = Spec.model_validate({
        **base.model_dump(mode="json"), "model": {"context": 64, "layers": 1, "hidden": 32, "heads": 2},
        "training": {"steps": 50, "global_batch": 8, "micro_batch": 4},
    })  # fmt: skip
    dataset_id = prepare(spec, store).dataset_id
    dataset = Dataset.open(store, dataset_id, tmp_path / "cache")
    tokenizer, rows = load_tokenizer(dataset.tokenizer_json()), dataset.training(64, 8, spec.training.seed)
    kinds: set[str] = set()
    for step in (1, 17, 33, 34, 50):
        batch = batch_of(store, spec, dataset_id, step)
        assert (batch.note, len(batch.rows)) == ("", 8)
        for row in batch.rows:
            assert list(row.tokens) == rows.batch(step - 1)[row.number].tolist()
            assert (row.passages[0].tokens[0], row.passages[-1].tokens[1]) == (0, 65)
            for passage in row.passages:
                ids = [*tokenizer.encode(text_of(passage.where), add_special_tokens=False).ids, dataset.end_of_text]
                assert passage.of is not None
                assert ids[slice(*passage.of)] == list(row.tokens[slice(*passage.tokens)]), passage
                kinds.add(Path(passage.where.partition(":")[0]).suffix)
    assert kinds == {".txt", ".jsonl", ".gz", ".parquet"}
    part = batch_of(store, spec, dataset_id, 17, micro_batch=1)
    assert [(row.number, row.micro_batch) for row in part.rows] == [(4, 1), (5, 1), (6, 1), (7, 1)]
    assert part.rows == batch_of(store, spec, dataset_id, 17).rows[4:]
    for step, micro_batch, words in ((0, None, "steps 1 to 50"), (51, None, "steps 1 to 50"), (1, 2, "0 to 1")):
        with pytest.raises(DataError, match=words):
            batch_of(store, spec, dataset_id, step, micro_batch)

    (corpus / "003.txt").write_text("another text altogether")
    changed = batch_of(store, spec, dataset_id, 17)
    assert "no longer" in changed.note
    assert [row.tokens for row in changed.rows] == [row.tokens for row in batch_of(store, spec, dataset_id, 17).rows]
    for row in changed.rows:  # end-of-text tokens still separate the documents
        assert [row.tokens[passage.tokens[1] - 1] for passage in row.passages[:-1]] == [dataset.end_of_text] * (
            len(row.passages) - 1
        )


def test_conversations_are_found_in_the_samples_that_they_were_packed_into(
    store: Store, make_chat: Callable[..., Spec]
) -> None:
    unanswered = {"messages": [{"role": "user", "content": "no answer comes"}]}
    talks: list[object] = [question(number, 3 * (number % 30)) for number in range(80)]
    base = make_chat([*talks[:40], unanswered, talks[3], *talks[40:]], cleaning={"on_bad_record": "skip"})
    training = {"steps": 9, "global_batch": 4, "micro_batch": 2}
    spec = Spec.model_validate({**base.model_dump(mode="json"), "training": training})
    dataset_id = prepare(spec, store).dataset_id
    answered = 0
    for step in range(1, 10):
        for row in batch_of(store, spec, dataset_id, step).rows:
            for passage in row.passages:
                line = int(passage.where.rpartition(":")[2])
                number = line - 1 if line <= 40 else line - 3
                text = load_tokenizer_of(store, spec, dataset_id).decode(
                    list(row.tokens[slice(*passage.tokens)]), skip_special_tokens=False
                )
                if passage.of is not None and passage.of[0] == 0 and passage.tokens[1] < len(row.tokens):
                    assert f"user\n{number}?<|im_end|>" in text
                    answered += 1
    assert answered > 20


def load_tokenizer_of(store: Store, spec: Spec, dataset_id: str) -> Tokenizer:
    from holdfast.runtime.environment import cache_dir

    return load_tokenizer(Dataset.open(store, dataset_id, cache_dir()).tokenizer_json())
