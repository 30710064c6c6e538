"""A model that gets a third of the sums of two digits right, and prompts to learn the rest from.

`python examples/rl/make_base.py` teaches a model of about 120,000 parameters sums in a plain loop, and stops as
soon as a third of its sampled answers are right. It writes the model in the Hugging Face layout and the prompts into
examples/rl/.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files
from holdfast.model.initialise import initialise
from holdfast.model.token_logprobs import IGNORED
from holdfast.rollouts.generation import Sampling, generate_lot
from holdfast.spec.model import Model

HERE = Path(__file__).parent
SHAPE = Model(layers=2, hidden=64, heads=4, context=24)  # room for two tries, see retry.yaml
ROW = 8  # tokens of a sum with its answer and its end
END, VOCABULARY = "<|endoftext|>", 257
BATCH, CHECK_EVERY, REPEATS, MOST_STEPS = 128, 5, 4, 1000
ENOUGH = 1 / 3


def tokenizer_json() -> str:
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0, **{letter: number + 1 for number, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return str(tokenizer.to_str())


def sums() -> list[dict[str, str]]:
    """All sums of two digits, and their answers."""
    return [{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one in range(10) for other in range(10)]


class Teacher:
    """Teaches a model sums."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json())
        self.decoder = Decoder.empty(SHAPE, VOCABULARY)
        initialise(self.decoder, seed=1)
        self._optimizer = torch.optim.AdamW(self.decoder.parameters(), lr=3e-3, weight_decay=0)

    def teach(self, batch: list[dict[str, str]]) -> None:
        """One step on the answers of some prompts."""
        rows = torch.full((len(batch), ROW + 1), UNCOUNTED)
        for row, each in zip(rows, batch, strict=True):
            prompt, answer = self._ids(each["prompt"]), [*self._ids(each["answer"]), 0]
            row[: len(prompt)] = torch.tensor(prompt) | UNCOUNTED
            row[len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        targets = torch.where(rows[:, 1:] & UNCOUNTED != 0, IGNORED, rows[:, 1:])
        logits = self.decoder(rows[:, :-1] & 0xFFFF)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def right(self, asked: list[dict[str, str]]) -> float:
        """The share of right answers."""
        sampling = Sampling(answers=1, most_tokens=3, temperature=1.0, seed=0, end_of_text=0)
        generated = generate_lot(
            self.decoder, [self._ids(each["prompt"]) for each in asked], range(len(asked)), sampling
        )
        texts = [self._tokenizer.decode([token for token in answer.tokens if token]) for (answer,) in generated]
        return sum(text == each["answer"] for text, each in zip(texts, asked, strict=True)) / len(asked)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def main() -> None:
    """Write both."""
    (HERE / "sums.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in sums()))
    teacher, draw = Teacher(), random.Random(1)  # noqa: S311 - nothing here is secret
    for step in range(1, MOST_STEPS + 1):
        teacher.teach(draw.choices(sums(), k=BATCH))
        if step % CHECK_EVERY == 0 and (share := teacher.right(sums() * REPEATS)) >= ENOUGH:
            print(f"step {step}: {share:.0%} of the answers are right")
            break
    weights = teacher.decoder.state_dict()
    files = export_files(
        SHAPE, VOCABULARY, lambda name: iter([weights[name]]), tokenizer_json=tokenizer_json(), end_of_text=END
    )
    (HERE / "base").mkdir(exist_ok=True)
    for file in files:
        (HERE / "base" / file.name).write_bytes(b"".join(file.content()))


if __name__ == "__main__":
    main()
