"""`holdfast data`: figures, drops and samples of a dataset, on the terminal and on a page, without a training."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.corpus.overview import overview
from holdfast.dataset import Dataset
from holdfast.pipelines.cli import app
from holdfast.spec import Spec
from holdfast.store import Store
from tests.corpus.conftest import prose, write_jsonl
from tests.corpus.test_chat import MARKED, tokenizer_json


def written(folder: Path, kind: str) -> Path:
    data: dict[str, object] = {"validation_fraction": 0.1, "workers": 1, "kind": kind}
    if kind == "text":
        texts = [prose(number, 20 + number) for number in range(40)]
        source = write_jsonl(folder / "a.jsonl", [*texts, texts[3], ""])
        data |= {"tokenizer": {"vocabulary": 300}}
    else:
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "chat_template.jinja").write_text(MARKED)
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
        source = folder / "a.jsonl"
        talks = [{"instruction": f"What is {n}?", "output": f"<b>{n}</b>" if n % 9 else ""} for n in range(60)]
        source.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
        path = str(folder / "tokenizer.json")
        data |= {"tokenizer": {"kind": "file", "path": path, "end_of_text": "<|im_end|>"}, "document_masks": True}
    sources = [{"uri": str(source)} | ({"fields": "alpaca"} if kind == "chat" else {})]
    cleaning = {"on_bad_record": "skip"}
    spec = {
        "name": "chats", "data": {**data, "sources": sources, "cleaning": cleaning},
        "model": {"context": 128}, "training": {"steps": 3, "global_batch": 4, "micro_batch": 4},
    }  # fmt: skip
    (folder / "spec.yaml").write_text(json.dumps(spec))
    return folder / "spec.yaml"


def test_the_samples_are_rows_of_the_first_batches(store: Store, tmp_path: Path) -> None:
    spec = Spec.model_validate(json.loads(written(tmp_path, "text").read_text()))
    found = overview(spec, store, samples=6)
    dataset = Dataset.open(store, found.dataset_id, tmp_path / "cache")
    batches = dataset.training(128, 4, spec.training.seed, None, spec.data.shuffle)
    assert len(found.samples) == 6
    assert all(sample.tokens == 129 and sample.counted == 128 for sample in found.samples)
    ends = [int((row[:-1] == dataset.end_of_text).sum()) for step in (0, 1) for row in batches.batch(step, slice(0, 4))]
    begins = [sum(segment.begins for segment in sample.segments) - 1 for sample in found.samples]
    assert begins == ends[:6]
    assert sum(each.documents for each in found.histogram) == found.documents["train"]
    lengths = [each.low for each in found.histogram]
    assert lengths == sorted(lengths)
    assert {drop.reason: drop.count for drop in found.dropped} == {"duplicate": 1, "too_short": 1}
    assert found.epochs == pytest.approx(3 * 4 * 128 / found.tokens["train"])


def test_the_page_of_conversations_colors_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    spec, page = written(tmp_path, "chat"), tmp_path / "page.html"
    arguments = ["data", str(spec), "--samples", "2", "-o", str(page), "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "7 no text, the first: " in result.stdout
    assert re.search(r"train: \d+ documents, [\d,]+ tokens", result.stdout)
    text = page.read_text()
    counted = re.findall(r'<span class="counted"[^>]*>(.*?)</span>', text)
    assert counted
    assert all(re.fullmatch(r"&lt;b&gt;\d+&lt;/b&gt;&lt;\|im_end\|&gt;", each) for each in counted)
    assert "What is" in text
    assert "What is" not in "".join(counted)
    assert "× padding" in text
    assert "<script" not in text
    again = CliRunner().invoke(app, [*arguments, "--json"])
    summary = json.loads(again.stdout)
    assert summary["created"] is False
    assert summary["page"] == str(page)
    assert not (tmp_path / "store" / "runs").exists()


def test_data_of_a_script_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: a\ntrain: {script: train.py}\n")
    result = CliRunner().invoke(app, ["data", str(spec)])
    assert result.exit_code != 0
