"""What could go wrong with which samples form a step, and with the text that they are made of."""

from __future__ import annotations

from tests.planted.bug import Bug

_DATASET = "tests/dataset"

BUGS = [
    Bug(
        "holdfast/dataset/permutation.py",
        "ROUNDS = 6",
        "ROUNDS = 4",
        f"{_DATASET} tests/golden",
        "another permutation is another model",
    ),
    Bug(
        "holdfast/dataset/permutation.py",
        "outside = value >= np.uint64(self.n)\n        while",
        "outside = value > np.uint64(self.n)\n        while",
        _DATASET,
        "one place would go beyond the range",
    ),
    Bug(
        "holdfast/dataset/permutation.py",
        "low ^ self._keys[number])",
        "low)",
        _DATASET,
        "every seed would shuffle alike",
    ),
    Bug(
        "holdfast/dataset/batches.py",
        "window is None or window[0] != number",
        "window is None",
        _DATASET,
        "a stale window: step 512 at batch 8 would equal step 0",
    ),
    Bug(
        "holdfast/dataset/batches.py",
        "stream.locate(start[chosen], self.context + 1)",
        "stream.locate(start[chosen], self.context)",
        _DATASET,
        "the last target of a shard would be read beyond it",
    ),
    Bug(
        "holdfast/dataset/batches.py",
        "start = sample * self.context",
        "start = sample * (self.context + 1)",
        _DATASET,
        "samples share their end tokens: otherwise tokens are left out",
    ),
    Bug(
        "holdfast/dataset/mixture.py",
        "+ block * self._quotas[source]",
        "",
        _DATASET,
        "each block would repeat the samples of the first",
    ),
    Bug(
        "holdfast/dataset/mixture.py",
        "derive_key(seed, purpose, epoch)",
        "derive_key(seed, purpose, 0)",
        _DATASET,
        "every epoch in one order",
    ),
    Bug(
        "holdfast/dataset/mixture.py",
        'side="right") - 1\n        return source, sample',
        'side="left") - 1\n        return source, sample',
        _DATASET,
        "the first sample of a source would belong to another",
    ),
    Bug(
        "holdfast/dataset/stream.py",
        "max(0, (self.tokens - 1) // context)",
        "max(0, self.tokens // context)",
        _DATASET,
        "a sample whose last target does not exist",
    ),
    Bug(
        "holdfast/dataset/stream.py",
        "pending, at = [], end + 1",
        "pending, at = [], end",
        _DATASET,
        "a document would begin with the end of the one before",
    ),
    Bug(
        "holdfast/corpus/cleaning.py",
        "if size > rules.max_characters:",
        "if size >= rules.max_characters:",
        "tests/corpus",
        "the bound itself is allowed",
    ),
    Bug(
        "holdfast/corpus/cleaning.py",
        "1 - len(set(lines)) / len(lines)",
        "len(set(lines)) / len(lines)",
        "tests/corpus",
        "the good documents would be dropped",
    ),
    Bug(
        "holdfast/corpus/encode.py",
        "tokenizer.encode_special_tokens = True",
        "tokenizer.encode_special_tokens = False",
        "tests/corpus",
        "a text could end a document by spelling a special token",
    ),
    Bug(
        "holdfast/corpus/encode.py",
        r"|[\t-\r ]+(?![^\t-\r ])|",
        "|",
        "tests/corpus",
        "other words than the tokenizer's own",
    ),
    Bug(
        "holdfast/corpus/duplicates.py",
        "repeated[order[1:][same]] = True",
        "repeated[order[:-1][same]] = True",
        "tests/corpus",
        "of two equal documents the first one stays",
    ),
    Bug(
        "holdfast/corpus/shard_plan.py",
        "if share_of(start, total, count) == number:",
        "if share_of(start, total, count) <= number:",
        "tests/corpus/test_fan_out.py",
        "units would be made twice",
    ),
    Bug(
        "holdfast/corpus/shard_plan.py",
        "<= number <= share_of(end, total, count)",
        "<= number < share_of(end, total, count)",
        "tests/corpus/test_fan_out.py",
        "the last share would be left out",
    ),
    Bug(
        "holdfast/corpus/unit_reader.py",
        "self.pieces[number + len(waiting) : number + AHEAD]",
        "self.pieces[number : number + AHEAD - len(waiting)]",
        "tests/corpus",
        "the join would read units out of their order",
    ),
    Bug(
        "holdfast/corpus/units.py",
        'if _digest(raw) == header["index"] else None',
        "if raw else None",
        "tests/corpus/test_fan_out.py",
        "a damaged index would decide which documents are duplicates",
    ),
    Bug(
        "holdfast/corpus/duplicates.py",
        "_spread(parted, records, depth + 1)",
        "_spread(parted, records, depth)",
        "tests/corpus/test_fan_out.py",
        "a file that is too large would never be parted",
    ),
    Bug(
        "holdfast/corpus/duplicates.py",
        "if not inside:",
        "if not self._at:",
        "tests/corpus/test_fan_out.py",
        "the first documents would decide about all that follow",
    ),
]
