"""User-provided tokenizers: text stays text, tokens represent it, and no dataset is random."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from holdfast.components.preprocess import run
from holdfast.corpus import identify
from holdfast.corpus.chat import ChatEncoder, ChatTemplate, conversation_text
from holdfast.corpus.encode import LossyError, settled
from holdfast.corpus.tokenizer import read_settled
from holdfast.dataset import Dataset
from holdfast.spec import Spec, parse_spec
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec, prose, tree, write_jsonl


def byte_level(**model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator([prose(number) for number in range(20)], trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """A tokenizer that knows only the letters a to z."""
    vocabulary = {"<unk>": 0, "</s>": 1, " ": 2, **{chr(97 + number): 3 + number for number in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.fixture
def bring(make_spec: MakeSpec, tmp_path: Path) -> Callable[..., Spec]:
    def make(tokenizer: str, texts: list[str], end_of_text: str = "</s>", **data: Any) -> Spec:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
        corpus = write_jsonl(tmp_path / "a.jsonl", texts)
        settings = {"kind": "file", "path": str(tmp_path / "tokenizer.json"), "end_of_text": end_of_text}
        return make_spec(corpus, tokenizer=settings, **data)

    return make


def test_an_end_of_text_that_is_no_special_token_stays_text_in_documents(bring: Any, store: Store) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<|EOT|>"])
    texts = [f"{prose(number)} <|EOT|> more" for number in range(40)]
    spec = bring(tokenizer.to_str(), texts, "<|EOT|>", validation_fraction=0.2)
    prepared = run(spec, store)
    dataset = Dataset.open(store, prepared.dataset_id, Path("unused"))
    files = tree(store, f"datasets/{prepared.dataset_id}/")
    tokens = np.concatenate([np.frombuffer(raw, "<u2") for name, raw in files.items() if name.endswith(".tokens")])
    assert (tokens == dataset.end_of_text).sum() == sum(prepared.documents.values()) == 40
    assert len(list(dataset.validation_documents())) == prepared.documents["validation"] > 0
    assert settled(dataset.tokenizer_json(), "<|EOT|>") == dataset.tokenizer_json()


def test_a_text_that_gives_the_end_token_all_the_same_is_refused_or_counted(bring: Any, store: Store) -> None:
    """A word-level tokenizer can have a special token among its words."""
    tokenizer = word_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    words = Tokenizer.from_str(tokenizer.to_str())
    words.pre_tokenizer = None
    texts = [*(chr(97 + number) for number in range(20)), "</s>"]
    with pytest.raises(DataError, match=r"a\.jsonl:21: gives token 1, which is data\.tokenizer\.end_of_text"):
        run(bring(words.to_str(), texts), store)
    prepared = run(bring(words.to_str(), texts, cleaning={"on_bad_record": "skip"}, validation_fraction=0.0), store)
    assert prepared.dropped["end_in_text"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_text_that_does_not_round_trip_through_tokens_is_refused_or_counted(
    late: bool, bring: Any, store: Store
) -> None:
    filler = [f"{chr(97 + number)} {'x' * 60_000}" for number in range(20)]
    texts = [*filler, "straße"] if late else ["straße", *filler]
    place = 21 if late else 1
    with pytest.raises(DataError, match=rf"a\.jsonl:{place}: does not come back from the tokenizer: 'ße' became '<unk"):
        run(bring(word_level().to_str(), texts), store)
    prepared = run(bring(word_level().to_str(), texts, cleaning={"on_bad_record": "skip"}), store)
    assert prepared.dropped == {"lossy": 1}
    assert prepared.examples["lossy"].place.endswith(f"a.jsonl:{place}")


def test_conversations_are_compared_too_apart_from_blanks_around_special_tokens() -> None:
    def encode(tokenizer: Tokenizer, content: str) -> bytes:
        template = ChatTemplate("{% for m in messages %}{{ '</s> ' + m.content }}{% endfor %}", {})
        talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]}
        return ChatEncoder(tokenizer.to_str(), template, 1).encode(conversation_text(talk) or "")

    tokenizer = word_level()
    encode(tokenizer, "fine")
    with pytest.raises(LossyError, match="'ß"):
        encode(tokenizer, "straße")
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(LossyError, match="'F"):
        encode(tokenizer, "Fine")
    tokenizer.normalizer, tokenizer.decoder = normalizers.Prepend(" "), decoders.Strip(" ", 1, 0)
    encode(tokenizer, "fine")
    composed = byte_level()
    composed.add_special_tokens(["</s>"])
    composed.normalizer = normalizers.NFC()
    encode(composed, "e\u0301")


def test_dropout_of_a_tokenizer_makes_no_dataset_random(bring: Any, tmp_path: Path) -> None:
    from holdfast.store import open_store

    raw = byte_level()
    raw.add_special_tokens(["</s>"])
    tokenizer = json.loads(raw.to_str())
    plain = json.dumps(tokenizer)
    tokenizer["model"]["dropout"] = 0.4
    texts = [prose(number) for number in range(40)]
    spec = bring(json.dumps(tokenizer), texts)
    shards = []
    for name in ("one", "two"):
        target = open_store(f"file://{tmp_path / name}")
        prepared = run(spec, target)
        shards.append(tree(target, f"datasets/{prepared.dataset_id}/"))
    assert shards[0] == shards[1]
    tokenizer_bytes = next(raw for name, raw in shards[0].items() if name.endswith("tokenizer.json"))
    assert json.loads(tokenizer_bytes) == json.loads(plain)
    random_id = identify(spec)
    (tmp_path / "tokenizer.json").write_text(plain)
    assert identify(spec) != random_id or json.dumps(tokenizer, ensure_ascii=False) == plain
    assert read_settled(spec.data.tokenizer) == plain  # a valid tokenizer stays unchanged, to the byte


TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end_of_text", "refused", "warned"),
    [
        (TURNS, "<|endoftext|>", True, False),
        (TURNS, "<|im_end|>", False, False),
        (TURNS.replace("{{ '<|im_start|>' + m['role']", "{% generation %}{{ '<|im_start|>' + m['role']").replace(
            "{% endfor", "{% endgeneration %}{% endfor"), "<|endoftext|>", True, False),
        (WITHOUT_END, "<|endoftext|>", False, True),
        (WITHOUT_END, "<|im_end|>", False, False),
    ],
)  # fmt: skip
def test_an_end_of_text_that_does_not_end_turns_is_refused_with_the_right_one(
    template: str, end_of_text: str, refused: bool, warned: bool, store: Store, tmp_path: Path, caplog: Any
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    talks = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
        for number in range(20)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    spec = parse_spec(
        f"name: c\ndata: {{kind: chat, document_masks: true, sources: [{{uri: {tmp_path}/talks.jsonl}}]}}\n",
        [f"data.tokenizer.path={tmp_path}/tokenizer.json", "data.tokenizer.kind=file", "data.validation_fraction=0.2",
         f"data.tokenizer.end_of_text={end_of_text}", "model.context=64"],
    )  # fmt: skip
    if refused:
        with pytest.raises(DataError, match=r"end_of_text: is '<\|endoftext\|>'.*set it to '<\|im_end\|>'"):
            run(spec, store)
        return
    run(spec, store)
    assert ("the eos_token next to the tokenizer is '<|im_end|>'" in caplog.text) == warned
