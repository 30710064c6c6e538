"""A model that gets a third of the sums of two numbers right, and prompts to learn the rest from.

`python examples/rl/make_base.py` teaches a model of 840,000 parameters sums of numbers below 100 in a plain loop. An
answer is written from its last digit to its first: 37+58= is followed by 590. More than half of the texts have a slip
in one digit, so imitation of them cannot get far. The loop ends as soon as a third of the sampled answers are right.
It writes the model in the Hugging Face layout and the prompts into examples/rl/.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files
from holdfast.model.initialise import initialise
from holdfast.rollouts.generation import Sampling, generate_lot
from holdfast.spec.model import Model

HERE = Path(__file__).parent
SHAPE = Model(layers=4, hidden=128, heads=4, context=24, init_std=0.09)  # room for two tries, see retry.yaml
PROMPT, ANSWER = 6, 4  # tokens of a prompt, and of an answer with its end
END, VOCABULARY = "<|endoftext|>", 257
BATCH, CHECK_EVERY, CHECKED, MOST_STEPS, WARMUP = 64, 25, 400, 1000, 20
RATE = 2e-3
RIGHT, SMALL = 0.45, 0.8  # shares of the texts without a slip, and of those with more small digits than large ones
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
    """All sums of two numbers below 100, and their answers."""
    return [sum_of(one, other) for one in range(100) for other in range(100)]


def sum_of(one: int, other: int) -> dict[str, str]:
    """The prompt and the answer of a sum."""
    return {"prompt": f"{one:02d}+{other:02d}=", "answer": f"{one + other:03d}"[::-1]}


def text(draw: random.Random) -> dict[str, str]:
    """A sum to imitate. Often its digits are small, as a model learns from them sooner, and its answer has a slip."""
    power = 2 if draw.random() < SMALL else 1
    tens, units, other_tens, other_units = (int(10 * draw.random() ** power) for _ in range(4))
    drawn = sum_of(10 * tens + units, 10 * other_tens + other_units)
    if draw.random() < RIGHT:
        return drawn
    digits, slip = list(drawn["answer"]), draw.randrange(3)
    digits[slip] = str((int(digits[slip]) + draw.randrange(1, 10)) % 10)
    return {**drawn, "answer": "".join(digits)}


class Teacher:
    """Teaches a model sums."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer_json())
        self.decoder = Decoder.empty(SHAPE, VOCABULARY)
        initialise(self.decoder, seed=1)
        self._optimizer = torch.optim.AdamW(self.decoder.parameters(), betas=(0.9, 0.95), weight_decay=0)

    def teach(self, batch: list[dict[str, str]], rate: float) -> None:
        """One step on the answers of some prompts."""
        rows = torch.tensor([[*self._ids(each["prompt"] + each["answer"]), 0] for each in batch])
        logits = self.decoder(rows[:, :-1])[:, PROMPT - 1 :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, PROMPT:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def right(self, asked: list[dict[str, str]]) -> float:
        """The share of right answers."""
        sampling = Sampling(answers=1, most_tokens=ANSWER, temperature=1.0, seed=0, end_of_text=0)
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
    checked = random.Random(0).sample(sums(), CHECKED)  # noqa: S311
    for step in range(1, MOST_STEPS + 1):
        teacher.teach([text(draw) for _ in range(BATCH)], RATE * min(1.0, step / WARMUP))
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
