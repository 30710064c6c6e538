"""Keys of preprocessing results: every setting that affects bytes is in the key, so no stale result is reused."""

import unicodedata
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.components.preprocess import run
from holdfast.corpus.decontamination import TaskNgrams
from holdfast.corpus.files import SourceFile
from holdfast.corpus.identity import dataset_settings
from holdfast.corpus.tokenizer import trained_key
from holdfast.corpus.units import Job, Piece
from holdfast.dataset import Dataset
from holdfast.spec.data import Cleaning, Data, Decontamination, NearDuplicates, Source, Tokenizer
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose, write_jsonl
from tests.spec.test_identity import other_value

JOB = Job("{}", "digest", "uint16", 0, Cleaning())
PIECE = Piece(0, (SourceFile("a", "local", "", "a", "digest", 5, "1", "jsonl", ""),), "text", (0, 5))
GROUPS = {"near_duplicates": NearDuplicates(), "decontaminate": Decontamination(tasks=(__file__,))}
DATA = Data(sources=(Source(uri="x"),))


def with_each_field_changed(section: BaseModel) -> dict[str, Any]:
    """The section with one field changed, by field name."""
    return {
        name: section.model_copy(update={name: GROUPS.get(name) or other_value(info, getattr(section, name))})
        for name, info in type(section).model_fields.items()
    }


def test_the_key_of_a_unit_follows_every_setting_of_cleaning_but_deduplication() -> None:
    keys = {
        name: PIECE.key(replace(JOB, cleaning=changed).settings)
        for name, changed in with_each_field_changed(Cleaning()).items()
    }
    assert keys.pop("deduplicate") == PIECE.key(JOB.settings)  # the join does deduplication
    assert keys.pop("decontaminate") == PIECE.key(JOB.settings)  # `Job.tasks` stands for it
    assert len({*keys.values(), PIECE.key(JOB.settings)}) == len(keys) + 1 >= 6


def test_the_key_of_a_unit_follows_every_field_of_its_job_and_its_piece() -> None:
    others: dict[str, Any] = {
        "tokenizer_digest": "other", "dtype": "uint32", "end_of_text": 1, "cleaning": Cleaning(unicode="none"),
        "template": "{}", "tasks": TaskNgrams(13, (), b"", b"", "digest"),
    }  # fmt: skip
    excluded = {"tokenizer_json", "template_name", "own"}  # the digest stands for the first; the second is for messages
    assert {field.name for field in fields(Job)} == others.keys() | excluded
    assert PIECE.key(replace(JOB, template_name="other").settings) == PIECE.key(JOB.settings)
    keys = [PIECE.key(replace(JOB, **{name: value}).settings) for name, value in others.items()]
    parts: dict[str, Any] = {"text_field": "more", "range": (0, 4), "kind": "chat", "reader": "other", "fields": "{}"}
    parts["files"] = (replace(PIECE.files[0], digest="other"),)
    file: dict[str, Any] = {"digest": "other", "format": "text", "compression": "gzip"}
    places: dict[str, Any] = {"name": "b", "kind": "s3", "root": "b", "path": "b", "size": 6, "stamp": "2"}
    assert {field.name for field in fields(SourceFile)} == file.keys() | places.keys()
    for name, value in (file | places).items():
        changed_piece = replace(PIECE, files=(replace(PIECE.files[0], **{name: value}),))
        assert (changed_piece.key(JOB.settings) == PIECE.key(JOB.settings)) == (name in places), name
    assert {field.name for field in fields(Piece)} == parts.keys() | {"source"}  # equal content is one unit
    keys += [replace(PIECE, **{name: value}).key(JOB.settings) for name, value in parts.items()]
    assert len({*keys, PIECE.key(JOB.settings)}) == len(keys) + 1
    assert replace(PIECE, source=7).key(JOB.settings) == PIECE.key(JOB.settings)


def test_the_key_of_a_trained_tokenizer_follows_its_corpus_its_settings_and_cleaning() -> None:
    changed = [
        DATA.model_copy(update={section: value})
        for section, whole in (("tokenizer", Tokenizer()), ("cleaning", Cleaning()))
        for name, value in with_each_field_changed(whole).items()
        if name not in GROUPS  # they apply to what is tokenized
    ]
    keys = [trained_key(DATA, "corpus"), trained_key(DATA, "other"), *(trained_key(data, "corpus") for data in changed)]
    assert len(set(keys)) == len(keys)


def test_the_settings_of_a_dataset_follow_every_field_of_its_data_that_decides_bytes() -> None:
    read_later = {"sources", "document_masks", "shuffle", "workers", "fan_out"}
    in_them = set(Data.model_fields) - read_later
    for name in in_them - {"kind"}:
        section = getattr(DATA, name)
        if not isinstance(section, BaseModel):
            changes = [DATA.model_copy(update={name: other_value(Data.model_fields[name], section)})]
        else:
            changes = [DATA.model_copy(update={name: value}) for value in with_each_field_changed(section).values()]
        talks = [data.model_copy(update={"kind": "chat"}) for data in (DATA, *changes)]
        settings = [str(dataset_settings(data, 16)) for data in talks]
        assert len(set(settings)) == len(settings), name
    kinds = [
        str(dataset_settings(DATA.model_copy(update={"kind": kind}), 16)) for kind in ("text", "chat", "preferences")
    ]
    assert len(set(kinds)) == 3
    assert dataset_settings(DATA.model_copy(update={"kind": "chat"}), 8) != dataset_settings(
        DATA.model_copy(update={"kind": "chat"}), 16
    )


@pytest.mark.parametrize(("form", "kept"), [("NFC", 1), ("NFKC", 1), ("none", 2)])
def test_two_spellings_of_one_text_are_one_document_in_one_split(
    store: Store, make_spec: MakeSpec, tmp_path: Path, form: str, kept: int
) -> None:
    """Duplicates and splits follow the normalized text. Otherwise one text could be in training and in validation."""
    texts = [f"caf\u00e9 {prose(number, 5)}" for number in range(12)]
    decomposed = [unicodedata.normalize("NFD", text) for text in texts]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *decomposed])
    tokenizer = {"vocabulary": 258}
    prepared = run(make_spec(path, cleaning={"unicode": form}, tokenizer=tokenizer, validation_fraction=0.5), store)
    assert sum(prepared.documents.values()) == 12 * kept
    assert prepared.dropped == ({"duplicate": 12} if kept == 1 else {})
    same = make_spec(
        path, cleaning={"unicode": form, "deduplicate": False}, tokenizer=tokenizer, validation_fraction=0.5
    )
    if kept == 1:
        dataset = Dataset.open(store, run(same, store).dataset_id, tmp_path / "cache")
        validation = [tokens.tobytes() for tokens in dataset.validation_documents()]
        assert sorted(validation) == sorted(2 * list(dict.fromkeys(validation)))  # both spellings in one split
        assert len(validation) not in (0, 24)
