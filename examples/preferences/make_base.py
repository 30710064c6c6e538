"""A model that answers, small enough for two cores, and preferences between answers.

`python examples/preferences/make_base.py` teaches the model as examples/lora/make_base.py does, and writes it and the
preferences into examples/preferences/.
"""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

HERE = Path(__file__).parent
LORA = runpy.run_path(str(HERE.parent / "lora" / "make_base.py"))


def preferences(count: int = 1000) -> list[dict[str, object]]:
    """Prompts with an answer as it was taught, in digits and small letters, and one that is not wanted."""
    draw = random.Random(3)  # noqa: S311 - nothing here is secret
    made = []
    for _ in range(count):
        word, number = draw.choice(LORA["CHAT"]["WORDS"]), draw.randint(0, 98)
        ask, good, bad = draw.choice(
            [
                (f"Which letter does {word} begin with?", word[0], word),
                (f"What follows {number}?", str(number + 1), str(number)),
            ]
        )
        prompt = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": ask}]
        answers = {
            name: [{"role": "assistant", "content": text}] for name, text in (("chosen", good), ("rejected", bad))
        }
        made.append({"prompt": prompt, **answers})
    return made


if __name__ == "__main__":
    (HERE / "preferences.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in preferences()))
    LORA["write_base"](HERE / "base")
    print(f"wrote {HERE / 'preferences.jsonl'} and {HERE / 'base'}")
