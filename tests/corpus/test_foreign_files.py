"""Files of other programs: names and keys that are not Unicode, joined and empty files, columns without values, and the
special tokens of older tokenizers.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from transformers import AutoTokenizer

from holdfast.components.preprocess import run
from holdfast.corpus.added_tokens import require_added_tokens
from holdfast.corpus.chat import ChatEncoder, ChatTemplate, conversation_text, read_template, specials_of
from holdfast.corpus.record_types import Flaw
from holdfast.corpus.records import place
from holdfast.corpus.sources import resolve
from holdfast.corpus.tokenizer import prepare
from holdfast.dataset.vocabulary import ID
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError
from holdfast.store import Store, open_store
from tests.corpus.conftest import MakeSpec, prose, write_jsonl
from tests.corpus.test_chat_matrix import CHATML, SPECIAL, tokenizer_json
from tests.corpus.test_tables import read

SKIP = {"cleaning": {"on_bad_record": "skip"}}
LINES = b"".join(json.dumps({"text": prose(number)}).encode() + b"\n" for number in range(9))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", rb'{"\ud800": 1}', "no_text"),
        ("a.csv", "text\nwide é\n".encode("utf-16"), "no_text"),
        ("b.csv", b"te\xffxt,n\n1,2\n", "no_text"),
        ("c.csv", b",".join(b"%d" % number * 9000 for number in range(20)) + b"\n", "no_text"),
        ("b.jsonl", b'{"' + b"k" * 200_000 + b'": 1}\n' + b'{"\\u001b[31m\\u0007": 1}', "no_text"),
        ("c.jsonl", b"[" * 200_000, "not_json"),
    ],
)
def test_whatever_a_bad_record_holds_it_is_only_counted(
    store: Store, make_spec: MakeSpec, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [prose(number) for number in range(40)])
    (tmp_path / name).write_bytes(content)
    prepared = run(make_spec(good, tmp_path / name, **SKIP), store)
    assert set(prepared.dropped) == {reason}
    assert sum(prepared.documents.values()) == 40
    assert prepared.examples[reason].detail.isprintable()


def test_a_name_with_controls_is_shown_on_one_line(tmp_path: Path) -> None:
    for name, shown in ((b"a\n\x1b[31mb.jsonl", r"a\n\x1b[31mb.jsonl:3"), (b"caf\xe9.jsonl", r"caf\udce9.jsonl:3")):
        folder = tmp_path / name.hex()
        folder.mkdir()
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(LINES)
        (source,) = resolve(Data.model_validate({"sources": [{"uri": str(folder)}]}))
        assert place(source.files[0], 3).endswith(shown)


def test_damage_at_the_beginning_of_a_later_stream_is_not_taken_for_the_end(tmp_path: Path) -> None:
    for name, compress in (("a.jsonl.bz2", bz2.compress), ("a.jsonl.xz", lzma.compress), ("a.jsonl.gz", gzip.compress),
                           ("a.jsonl.zst", zstandard.compress)):  # fmt: skip
        path, second = tmp_path / name, compress(LINES)
        path.write_bytes(compress(LINES) + b"?" + second[1:])
        *texts, flaw = read(path)
        assert len(texts) == 9
        assert isinstance(flaw, Flaw)
        assert flaw.reason == "corrupt"


def test_bzip2_has_no_padding_between_streams(tmp_path: Path) -> None:
    for name, compress in (("a.jsonl.bz2", bz2.compress), ("a.jsonl.xz", lzma.compress)):
        (tmp_path / name).write_bytes(compress(LINES) + bytes(8) + compress(LINES))
    *texts, flaw = read(tmp_path / "a.jsonl.bz2")
    assert len(texts) == 9
    assert isinstance(flaw, Flaw)
    assert len(read(tmp_path / "a.jsonl.xz")) == 2 * 9


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.txt.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.arrow", "a.parquet", "a.zip"]
)
def test_an_empty_file_of_a_format_that_has_a_beginning_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    (flaw,) = read(tmp_path / name)
    assert isinstance(flaw, Flaw)
    assert flaw.reason == "corrupt"


def test_a_tar_behind_another_is_reported(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        info = tarfile.TarInfo("1.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"one"))
    (tmp_path / "a.tar").write_bytes(raw.getvalue())
    assert read(tmp_path / "a.tar") == ["one"]
    (tmp_path / "a.tar").write_bytes(2 * raw.getvalue())
    text, flaw = read(tmp_path / "a.tar")
    assert text == "one"
    assert isinstance(flaw, Flaw)
    assert "has more data after its end" in flaw.detail


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_columns_of_other_writers_are_read(tmp_path: Path, format_: str) -> None:
    path = tmp_path / f"a.{format_}"
    for column, expected in ((pa.array(["a", "b"], pa.string_view()), ["a", "b"]), (pa.nulls(2), ["no_text"] * 2)):
        table = pa.table({"text": column})
        if format_ == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
        assert [one.reason if isinstance(one, Flaw) else one for one in read(path)] == expected


SHOWN = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ image_token }}|{{ pad_token is defined }}|{{ add_bos_token }}"
)
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
OTHER = {"bos_token": "<pad>", "eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": False,
                                             "normalized": False, "single_word": False}}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "legacy"),
    [
        ({}, SPECIAL),
        ({"bos_token": "<s>"}, OTHER),
        ({"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}, SPECIAL),
        ({**SPECIAL, "extra_special_tokens": {"image_token": "<|eot|>"}}, None),
        ({**SPECIAL, "image_token": "<|eot|>", "extra_special_tokens": ["<|sep|>"], "add_bos_token": True}, None),
        ({**SPECIAL, "bos_token": None, "image_token": None}, None),
    ],
)
def test_special_tokens_are_found_where_transformers_finds_them(
    tmp_path: Path, config: dict[str, Any], legacy: dict[str, Any] | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("none"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**FAST, **config, "chat_template": SHOWN + CHATML}))
    if legacy is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
    tokenizer = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
    data = Data.model_validate(
        {"sources": [{"uri": "x"}], "kind": "chat", "document_masks": True, "tokenizer": tokenizer}
    )
    talk = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes"}]}
    ours = ChatEncoder(tokenizer_json("none"), read_template(data), 0).encode(conversation_text(talk) or "")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(talk["messages"], return_dict=True)
    assert (np.frombuffer(ours, "<u4") & ID).tolist() == theirs["input_ids"]


TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"500": {**TOOL, "special": True}}}, {}),
        ({}, {"added_tokens": {"<tool>": 500}}),
        ({"additional_special_tokens": ["<tool>"]}, {}),
        ({"extra_special_tokens": [{**TOOL, "__type": "AddedToken"}]}, {}),
        ({"pad_token": "<tool>", "chat_template": CHATML + "{{ pad_token }}"}, {}),
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<tool>"]}}),
    ],
)
def test_a_tokenizer_without_the_tokens_of_the_files_next_to_it_is_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    folder, saved = tmp_path / "given", tmp_path / "saved"
    folder.mkdir()
    documents = {"tokenizer_config": {**FAST, **SPECIAL, "chat_template": CHATML, **config}, **files}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    (folder / "tokenizer.json").write_text(tokenizer_json("none"))

    def prepared(place: Path) -> str:
        tokenizer = {"kind": "file", "path": str(place / "tokenizer.json"), "end_of_text": SPECIAL["eos_token"]}
        data = {"sources": [{"uri": "x"}], "kind": "chat", "document_masks": True, "tokenizer": tokenizer}
        return prepare(Data.model_validate(data), "", [], store=open_store(f"file://{tmp_path}/store")).json

    with pytest.raises(DataError, match=r"lacks '<tool>', which the files next to it add"):
        prepared(folder)
    AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(saved))
    assert "<tool>" in prepared(saved)


def test_a_missing_token_that_the_template_does_not_use_is_no_fault(tmp_path: Path) -> None:
    settings = {**FAST, **SPECIAL, "pad_token": "<tool>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate(CHATML, specials_of(settings))
    require_added_tokens(str(tmp_path / "tokenizer.json"), tokenizer_json("none"), template)
