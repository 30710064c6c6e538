"""A model that gets a third of two-digit sums right, and prompts to learn the rest from.

`python examples/rl/make_base.py` teaches a model of about one million parameters sums in a plain loop, and stops as
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
SHAPE = Model(layers=4, hidden=128, heads=4, context=16)
END, VOCABULARY = "<|endoftext|>", 257
BATCH, CHECK_EVERY, CHECKED, MOST_STEPS = 128, 20, 256, 3000
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


def prompts(count: int = 4000, seed: int = 0) -> list[dict[str, str]]:
    """Sums and their answers."""
    draw = random.Random(seed)  # noqa: S311 - nothing here is secret
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(count)]
    return [{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs]


class Teacher:
    """Teaches a model sums."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json())
        self.decoder = Decoder.empty(SHAPE, VOCABULARY)
        initialise(self.decoder, seed=1)
        self._optimizer = torch.optim.AdamW(self.decoder.parameters(), lr=1e-3, weight_decay=0)

    def teach(self, batch: list[dict[str, str]]) -> None:
        """One step on the answers of some prompts."""
        rows = torch.full((len(batch), SHAPE.context + 1), UNCOUNTED)
        for row, each in zip(rows, batch, strict=True):
            prompt, answer = self._ids(each["prompt"]), [*self._ids(each["answer"]), 0]
            row[: len(prompt)] = torch.tensor(prompt) | UNCOUNTED
            row[len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        targets = torch.where(rows[:, 1:] & UNCOUNTED != 0, IGNORED, rows[:, 1:])
        self.decoder(rows[:, :-1] & 0xFFFF, targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def right(self, asked: list[dict[str, str]]) -> float:
        """The share of right answers."""
        sampling = Sampling(answers=1, most_tokens=5, temperature=1.0, seed=0, end_of_text=0)
        generated = generate_lot(
            self.decoder, [self._ids(each["prompt"]) for each in asked], range(len(asked)), sampling
        )
        texts = [self._tokenizer.decode([token for token in answer.tokens if token]) for (answer,) in generated]
        return sum(text == each["answer"] for text, each in zip(texts, asked, strict=True)) / len(asked)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def main() -> None:
    """Write both."""
    lines = [json.dumps(each) for each in prompts()]
    (HERE / "sums.jsonl").write_text("\n".join(lines) + "\n")
    teacher, taught, checked = Teacher(), prompts(MOST_STEPS * BATCH, seed=1), prompts(CHECKED, seed=2)
    for step in range(MOST_STEPS):
        teacher.teach(taught[step * BATCH : (step + 1) * BATCH])
        if step % CHECK_EVERY == 0 and (share := teacher.right(checked)) >= ENOUGH:
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
