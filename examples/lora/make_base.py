"""A model that answers, small enough for two cores, and conversations of another kind: what adapters are for.

`python examples/lora/make_base.py` teaches the model of examples/chat in a plain loop, and writes it in
the Hugging Face layout, with the conversations, into examples/lora/. For a model of your own, name its folder, its
s3:// or its hf:// address in lora.yaml instead.
"""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import numpy as np
import torch

from holdfast.corpus.chat import ChatEncoder, ChatTemplate
from holdfast.dataset.vocabulary import ID, UNCOUNTED
from holdfast.model.decoder import Decoder
from holdfast.model.export import export_files, token_id
from holdfast.model.initialise import initialise
from holdfast.model.token_logprobs import IGNORED

HERE = Path(__file__).parent
CHAT = runpy.run_path(str(HERE.parent / "chat" / "make_base.py"))
STEPS, BATCH = 120, 32
END = "<|im_end|>"


def new_conversations(count: int = 800) -> list[dict[str, object]]:
    """Questions that the model was not taught: how long a word is."""
    draw = random.Random(1)  # noqa: S311 - nothing here is secret
    made = []
    for _ in range(count):
        messages = [{"role": "system", "content": "Answer in one word."}]
        for word in draw.sample(CHAT["WORDS"], draw.randint(1, 3)):
            messages += [{"role": "user", "content": f"How many letters has {word}?"}]
            messages += [{"role": "assistant", "content": str(len(word))}]
        made.append({"messages": messages})
    return made


def teach(decoder: Decoder, encoder: ChatEncoder, records: list[dict[str, object]]) -> None:
    """Some steps of AdamW on what the assistant says in the records."""
    draw, optimizer = random.Random(2), torch.optim.AdamW(decoder.parameters(), lr=3e-3, weight_decay=0)  # noqa: S311
    tokens = [np.frombuffer(encoder.encode(json.dumps(each)), "<u4").astype(np.int64) for each in records]
    for _ in range(STEPS):
        chosen = [each[: decoder.shape.context + 1] for each in draw.sample(tokens, BATCH)]
        rows = torch.full((BATCH, max(map(len, chosen))), UNCOUNTED)
        for row, each in zip(rows, chosen, strict=True):
            row[: len(each)] = torch.from_numpy(each)
        targets = torch.where(rows[:, 1:] & UNCOUNTED != 0, IGNORED, rows[:, 1:] & ID)
        decoder(rows[:, :-1] & ID, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def write_base(folder: Path) -> None:
    """Teach a model the conversations of examples/chat, and write it."""
    taught, new = CHAT["conversations"](), new_conversations()
    tokenizer = CHAT["tokenizer_json"]([json.dumps(each) for each in (*taught, *new)])
    decoder = Decoder.empty(CHAT["SHAPE"], 512)
    initialise(decoder, seed=1)
    teach(decoder, ChatEncoder(tokenizer, ChatTemplate(CHAT["TEMPLATE"], {}), token_id(tokenizer, END)), taught)
    weights = decoder.state_dict()
    files = export_files(
        decoder.shape,
        512,
        lambda name: iter([weights[name]]),
        tokenizer_json=tokenizer,
        end_of_text=END,
        chat_template=CHAT["TEMPLATE"],
    )
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file.name).write_bytes(b"".join(file.content()))


def main() -> None:
    """Write both."""
    (HERE / "conversations.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in new_conversations()))
    write_base(HERE / "base")
    print(f"wrote {HERE / 'conversations.jsonl'} and {HERE / 'base'}")


if __name__ == "__main__":
    main()
