"""The data of "A day with Holdfast" (docs/a-day.md): `python examples/a-day/make_data.py`.

It writes conversations in two layouts, and an exam, into examples/a-day/. Some records have a problem on purpose:
copies with other punctuation, questions of the exam, and a row without an answer.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import lzma
import random
import re
from pathlib import Path

HERE = Path(__file__).parent
TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: "{{choices.index(answer)}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def words() -> list[str]:
    """The words of the Zen of Python, which the standard library has."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return sorted(set(re.findall(r"[a-z]{3,}", codecs.decode(this.s, "rot13").lower())))


def letter(word: str) -> tuple[str, str]:
    """A question and its answer."""
    return f"Which letter does {word} begin with?", word[0]


def main() -> None:
    """Write the files."""
    draw = random.Random(0)  # noqa: S311 - nothing here is secret
    known = words()
    draw.shuffle(known)
    unseen, known = known[:16], known[16:]

    def question() -> tuple[str, str]:
        number = draw.randint(0, 998)
        return draw.choice([letter(draw.choice(known)), (f"What follows {number}?", str(number + 1))])

    talks = []
    for _ in range(700):
        pairs = [question() for _ in range(draw.randint(2, 3))]
        turns = [
            {"from": name, "value": text} for pair in pairs for name, text in zip(("human", "gpt"), pair, strict=True)
        ]
        talks.append({"conversations": turns})
    lines = "".join(json.dumps(talk) + "\n" for talk in talks)
    (HERE / "talks.jsonl.xz").write_bytes(lzma.compress(lines.encode()))

    rows = [question() for _ in range(300)]
    rows += [(f"which letter does {word.upper()} begin with??", word[0]) for word in known[:8]]  # similar to others
    rows += [letter(word) for word in unseen[:5]]  # questions of the exam
    rows += [("What follows 7?", "")]  # no answer
    with (HERE / "faq.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *rows])

    exam = HERE / "exam"
    exam.mkdir(exist_ok=True)
    (exam / "letters.yml").write_text(TASK)
    items = []
    for word in unseen:
        text, answer = letter(word)
        choices = sorted({answer, *draw.sample([other for other in "abcdefgimnoprstuw" if other != answer], 3)})
        items.append({"question": text, "choices": choices, "answer": answer})
    (exam / "letters.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


if __name__ == "__main__":
    main()
