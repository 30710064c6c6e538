"""A model to start from, small enough for two cores, and conversations: `python examples/chat/make_base.py`.

It writes a folder in the Hugging Face layout (random weights, a tokenizer, a chat template) and questions with answers,
both into examples/chat/. For a model of your own, name its folder, its s3:// or its hf:// address in chat.yaml instead.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files
from holdfast.model.initialise import initialise
from holdfast.spec.model import Model

HERE = Path(__file__).parent
SHAPE = Model(family="qwen3", layers=2, hidden=96, heads=4, kv_heads=2, head_dim=32, context=128)
TURNS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WORDS = ("holds", "keeps", "loses", "finds", "counts", "ships", "reads", "writes")


def conversations(count: int = 1500) -> list[dict[str, object]]:
    """Questions that a tiny model can learn to answer: which letter a word begins with, and what comes next."""
    draw = random.Random(0)  # noqa: S311 - nothing here is secret
    made = []
    for _ in range(count):
        messages = [{"role": "system", "content": "Answer in one word."}]
        for _ in range(draw.randint(1, 3)):
            word, number = draw.choice(WORDS), draw.randint(0, 98)
            ask, answer = draw.choice(
                [(f"Which letter does {word} begin with?", word[0]), (f"What follows {number}?", str(number + 1))]
            )
            messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        made.append({"messages": messages})
    return made


def tokenizer_json(texts: list[str]) -> str:
    """A byte-level BPE that knows the words of the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", *TURNS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def main() -> None:
    """Write both."""
    records = conversations()
    lines = [json.dumps(record) for record in records]
    (HERE / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer, decoder = tokenizer_json(lines), Decoder.empty(SHAPE, 512)
    initialise(decoder, seed=1)
    weights = decoder.state_dict()
    files = export_files(
        SHAPE,
        512,
        lambda name: iter([weights[name]]),
        tokenizer_json=tokenizer,
        end_of_text="<|im_end|>",
        chat_template=TEMPLATE,
    )
    folder = HERE / "base"
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file.name).write_bytes(b"".join(file.content()))
    print(f"wrote {HERE / 'conversations.jsonl'} and {folder}")


if __name__ == "__main__":
    main()
