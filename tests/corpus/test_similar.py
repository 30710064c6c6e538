"""Near duplicates and decontamination: what they find, counted by reason, the same bytes on any number of workers."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from holdfast.corpus import divide, duplicates, identify, prepare, tokenise, units
from holdfast.corpus.decontamination import TaskNgrams, tasks_digest
from holdfast.corpus.duplicates import near_repeats
from holdfast.corpus.ngrams import BAND_BYTES, MinHash, _words, ngrams, word_hashes
from holdfast.spec.data import Decontamination, NearDuplicates
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, open_store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl

NEAR: dict[str, object] = {"near_duplicates": {}}
BANDS = "99cd8c90414d0f6b97a616b1bb9a28016dbd7cd3ff30d59bc3f4ac922b81de08"


def words(seed: int, count: int = 200) -> list[str]:
    source = random.Random(seed)
    return [f"{source.choice('abcdefgh')}{source.randrange(5000)}" for _ in range(count)]


def similar(text: list[str], share: float, seed: int = 0) -> list[str]:
    """The words with a share of them replaced."""
    source = random.Random(seed)
    return [f"new{source.randrange(10**6)}" if source.random() < share else word for word in text]


def test_similar_documents_share_bands_as_often_as_their_similarity_gives() -> None:
    minhash = MinHash(NearDuplicates(words=1, bands=10, rows=3))
    expected, shared = 0.0, 0
    for seed in range(150):
        one = words(seed)
        other = similar(one, 0.45, seed)
        similarity = len(set(one) & set(other)) / len(set(one) | set(other))
        expected += 1 - (1 - similarity**3) ** 10
        bands = [np.frombuffer(minhash.bands(" ".join(text)), dtype=f"V{BAND_BYTES}") for text in (one, other)]
        shared += bool((bands[0] == bands[1]).any())
    assert 20 < expected < 130
    assert abs(shared - expected) < 20  # three standard deviations


def test_the_bands_of_a_text_never_change() -> None:
    minhash = MinHash(NearDuplicates(bands=2, rows=2))
    text = "The quick brown fox jumps over the lazy dog, äöü 你好."
    assert minhash.bands(text).hex() == BANDS
    assert minhash.bands(text.upper().replace(",", " ;")) == minhash.bands(text)
    assert minhash.bands("one") != minhash.bands("two")
    assert minhash.bands("!") != minhash.bands("?")


def test_long_words_take_no_lasting_memory() -> None:
    word = "QUJD" * 100_000
    assert word_hashes(f"a {word}").tolist() == word_hashes(f"A {word}").tolist()
    assert word.lower() not in _words


def test_near_repeats_are_found_in_memory_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(3)
    bands = source.integers(0, 40, size=(500, 3)).astype(np.uint8)
    digests = np.zeros((500, 3, 16), dtype=np.uint8)
    digests[:, :, 0] = bands
    parts = np.split(digests.view("V16").reshape(500, 3), [0, 130, 131, 400])
    expected = [any(bands[at, b] in bands[:at, b] for b in range(3)) for at in range(500)]
    for chunk in (64, 2**19):
        monkeypatch.setattr(duplicates, "CHUNK", chunk)
        with near_repeats(iter(parts), 3) as take:
            assert np.concatenate([take(170), take(0), take(330)]).tolist() == expected


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [" ".join(words(number)) for number in range(40)]
    texts += [" ".join(similar(words(number), 0.01, number)) for number in range(10)]
    texts += texts[20:25]
    return write_jsonl(tmp_path / "a.jsonl", texts)


def test_near_duplicates_are_dropped_and_counted(corpus: Path, store: Store, make_spec: MakeSpec) -> None:
    prepared = prepare(make_spec(corpus, cleaning=NEAR), store)
    assert prepared.dropped["duplicate"] == 5
    assert 7 <= prepared.dropped["near_duplicate"] <= 10
    assert sum(prepared.documents.values()) == 55 - sum(prepared.dropped.values())
    assert "is similar to an earlier one" in prepared.examples["near_duplicate"].detail
    assert prepared.examples["near_duplicate"].place.endswith("a.jsonl:41")
    assert identify(make_spec(corpus)) != prepared.dataset_id
    assert identify(make_spec(corpus, cleaning={"near_duplicates": {"rows": 9}})) != prepared.dataset_id


def test_shares_give_the_bytes_of_one_process_also_after_a_loss(
    corpus: Path, store: Store, make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 8000)
    monkeypatch.setattr(units, "PART_BYTES", 3000)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": " ".join(words(3)[40:80])}) + "\n")
    rules = {**NEAR, "decontaminate": {"tasks": [str(tasks)]}}
    spec = make_spec(corpus, cleaning=rules)
    whole = prepare(spec, store)
    other = open_store(f"file://{tmp_path / 'other'}")
    divided = divide(spec, other, shares=3)
    for share in reversed(divided.shares):
        tokenise(spec, other, divided.division, share)
    lost = next(key for key in tree(other, "datasets/_units/") if key.endswith("000001"))
    other.delete(lost)
    joined = prepare(spec, other, division=divided.division)
    assert joined.dropped == whole.dropped
    assert set(whole.dropped) == {"contaminated", "duplicate", "near_duplicate"}
    prefix = f"datasets/{whole.dataset_id}/"
    assert tree(other, prefix) == tree(store, prefix)
    again = prepare(make_spec(corpus, cleaning={**rules, "deduplicate": False}), store)
    assert again.units_reused == again.units  # what is similar is decided in the join


def test_contaminated_documents_are_named_with_their_task(store: Store, make_spec: MakeSpec, tmp_path: Path) -> None:
    item = words(1000, 30)
    texts = [prose(number) for number in range(30)]
    texts[7] += " " + " ".join(item[5:18]).upper() + "."
    texts[9] += " " + " ".join(item[5:17])  # one word too few
    corpus = write_jsonl(tmp_path / "a.jsonl", texts)
    tasks = tmp_path / "mmlu.jsonl"
    tasks.write_text('{"question": "short"}\n' + json.dumps({"doc": [{"question": " ".join(item)}]}) + "\n")
    rules = {"decontaminate": {"tasks": [str(tasks)]}}
    prepared = prepare(make_spec(corpus, cleaning=rules), store)
    assert prepared.dropped == {"contaminated": 1}
    example = prepared.examples["contaminated"]
    assert example.place.endswith("a.jsonl:8")
    assert "shares 13 words with mmlu.jsonl:2" in example.detail
    assert example.excerpt.startswith(" ".join(item[5:8]).upper())
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(tasks.read_bytes())
    assert identify(make_spec(corpus, cleaning={"decontaminate": {"tasks": [str(moved)]}})) == prepared.dataset_id
    moved.write_text(json.dumps({"question": " ".join(item[1:])}))
    assert identify(make_spec(corpus, cleaning={"decontaminate": {"tasks": [str(moved)]}})) != prepared.dataset_id


def test_tasks_are_read_as_records_or_lines(tmp_path: Path) -> None:
    item = words(5, 20)
    (tmp_path / "a.json").write_text(json.dumps([{"q": "x"}, {"q": " ".join(item)}]))
    (tmp_path / "a.txt").write_text("x\n\n" + " ".join(item) + "\n")
    separated = json.dumps({"q": "\u2028".join(item)}, ensure_ascii=False)  # no line break in JSON
    (tmp_path / "a.jsonl").write_text(f'{{"q": "x\u2028y"}}\r\n{separated}\n')
    for name, line in (("a.json", 2), ("a.txt", 3), ("a.jsonl", 2)):
        tasks = TaskNgrams.read(Decontamination(tasks=(str(tmp_path / name),)))
        assert tasks.places == (f"{name}:{line}",)
        assert tasks.digest == tasks_digest(Decontamination(tasks=(str(tmp_path / name),)))
        assert tasks.overlap("a " + ", ".join(item[3:16])) is not None
        assert tasks.overlap(" ".join(item[3:15])) is None
    (tmp_path / "lines.txt").write_bytes((tmp_path / "a.jsonl").read_bytes())  # other texts, so another dataset
    kinds = {tasks_digest(Decontamination(tasks=(str(tmp_path / name),))) for name in ("a.jsonl", "lines.txt")}
    assert len(kinds) == 2
    (tmp_path / "short.txt").write_text("only a few words\n")
    with pytest.raises(DataError, match=r"no text has 13 words; name files with longer texts"):
        TaskNgrams.read(Decontamination(tasks=(str(tmp_path / "short.txt"),)))
    with pytest.raises(MissingError, match=r"decontaminate\.tasks\.0: .*missing is no file"):
        TaskNgrams.read(Decontamination(tasks=(str(tmp_path / "missing"),)))
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        TaskNgrams.read(Decontamination(tasks=(str(tmp_path / "bad.jsonl"),)))


def test_ngrams_are_those_of_the_words() -> None:
    hashes = word_hashes("a b c a b c")
    grams = ngrams(hashes, 3)
    assert len(grams) == 4
    assert grams[0] == grams[3]
    assert len(set(grams.tolist())) == 3
    assert len(ngrams(hashes, 7)) == 0
