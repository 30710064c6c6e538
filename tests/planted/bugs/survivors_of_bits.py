"""Bugs that once passed the whole suite, in what makes and keeps the bits of a model, and neighbours of their kinds."""

from __future__ import annotations

from tests.planted.bug import Bug

_PLAN = "tests/spec/test_plan.py"
_KEYS = "tests/corpus/test_keys.py"
_MERGED = "tests/train/test_lora.py::test_merged_rows_are_those_of_exact_arithmetic_however_they_are_cut"
_READING = "tests/dataset/test_reading.py"
_ORDER = "tests/checkpoint/test_order.py"
_LEASE = "tests/checkpoint/test_lease.py"
_WAITS = "tests/checkpoint/test_waits.py"
_STEP = "tests/train/test_engine_step.py"
_PAIRS = "tests/train/test_preferences.py"
_UNIVERSAL = "tests/exchange/test_exchange.py::test_each_file_of_a_universal_checkpoint_is_taken_as_what_its_name_says"
_FOLDERS = "tests/store/test_file.py::test_each_new_folder_is_durable_before_an_object_in_it_has_its_key"
_PARTS = (
    "tests/store/test_s3_uploads.py"
    "::test_an_object_of_any_size_has_as_many_parts_as_s3_takes_and_none_that_is_too_small_or_large"
)
_GENERATE = "tests/model/test_generate.py"
_TRAIN_PLAN = "tests/train/test_plan.py"
_BORROW = "tests/checkpoint/test_fork.py"
_BATCHES = "tests/dataset/test_batches.py"

BUGS = [
    Bug(
        "holdfast/spec/plan.py",
        'if determinism == "elastic" else ()',
        'if determinism == "elastic" else ("parallel.processes",)',
        _PLAN,
        "an exact run would go on with another number of ranks",
    ),
    Bug(
        "holdfast/spec/plan.py",
        'for name, value in body["settings"].items() if name not in self.free}',
        'for name, value in body["settings"].items() if name not in (*self.free, "training.micro_batch")}',
        _PLAN,
        "an exact run would go on with another micro-batch",
    ),
    Bug(
        "holdfast/model/lora.py",
        "yield (some.double() + product * scale_of(lora)).float()",
        "yield (some.double() + product * (lora.alpha / (lora.rank or 1))).float()",
        _MERGED,
        "the merged export of rsLoRA would be another model than the trained one",
    ),
    Bug(
        "holdfast/model/lora.py",
        "self.lora_B(self.lora_A(x)) * self.scale if",
        "self.lora_B(self.lora_A(x)) * min(1.0, self.scale) if",
        _MERGED,
        "adapters would be trained with another scale than they are merged with",
    ),
    Bug(
        "holdfast/corpus/units.py",
        'self.cleaning.model_dump(exclude={"deduplicate"})',
        'self.cleaning.model_dump(exclude={"deduplicate", "unicode"})',
        _KEYS,
        "old tokens would stand under a new dataset id: a field of cleaning in no unit's key",
    ),
    Bug(
        "holdfast/corpus/units.py",
        "content, self.kind, self.text_field, self.range, settings]",
        "content, self.kind, self.range, settings]",
        _KEYS,
        "old tokens would stand under a new dataset id: the text field in no unit's key",
    ),
    Bug(
        "holdfast/corpus/tokenizer.py",
        '"cleaning": data.cleaning.model_dump(), "corpus": corpus}',
        '"cleaning": data.cleaning.model_dump(exclude={"min_characters"}), "corpus": corpus}',
        _KEYS,
        "a tokenizer that was trained on other text would be used again",
    ),
    Bug(
        "holdfast/corpus/identity.py",
        '("tokenizer", "cleaning", "validation_fraction", "shard_tokens")',
        '("tokenizer", "cleaning", "shard_tokens")',
        _KEYS,
        "another split would have the same dataset id",
    ),
    Bug(
        "holdfast/corpus/units.py",
        "        raw, tokens = document.encode(), found + end\n",
        "        raw, tokens = json.dumps([at, document]).encode(), found + end\n",
        _KEYS,
        "the same text would stand in both splits: each record digested for itself",
    ),
    Bug(
        "holdfast/corpus/cleaning.py",
        "        text = normalised(text, rules)\n        return _filtered([text], rules) or text",
        "        return _filtered([normalised(text, rules)], rules) or text",
        _KEYS,
        "the same text would stand in both splits: duplicates found before normalisation",
    ),
    Bug(
        "holdfast/dataset/shards.py",
        "last = (starts + length - 1) * width // BLOCK_BYTES",
        "last = (starts + length - 2) * width // BLOCK_BYTES",
        _READING,
        "damage would be trained on: the last token of a row unchecked",
    ),
    Bug(
        "holdfast/dataset/shards.py",
        "np.arange(first * width // BLOCK_BYTES, last * width // BLOCK_BYTES + 1)",
        "np.arange(first * width // BLOCK_BYTES, max(first * width // BLOCK_BYTES + 1, last * width // BLOCK_BYTES))",
        _READING,
        "damage would be trained on: the last block of a run unchecked",
    ),
    Bug(
        "holdfast/dataset/remote.py",
        "last = ((starts + length) * self._width - 1) // PIECE_BYTES",
        "last = ((starts + length) * self._width) // PIECE_BYTES",
        _READING,
        "a piece would be fetched that no row touches",
    ),
    Bug(
        "holdfast/dataset/mixture.py",
        'derive_key(self._seed, "block", block)',
        'derive_key(self._seed, "block")',
        _BATCHES,
        "the blocks of a mixture would all have one order, under the same id",
    ),
    Bug(
        "holdfast/dataset/mixture.py",
        "row * (self.block // self._rows | 1)",
        "row * (self.block // self._rows)",
        _BATCHES,
        "another order of the rows of a mixture under the same id",
    ),
    Bug(
        "holdfast/dataset/windows.py",
        '"rest", epoch)(place)',
        '"rest", 0)(place)',
        _BATCHES,
        "another order of the rest of an epoch under the same id",
    ),
    Bug(
        "holdfast/checkpoint/load.py",
        "    store.put(layout.damaged(run_id, step), manifest)\n    fence()\n    store.delete(key)\n",
        "    fence()\n    store.delete(key)\n    store.put(layout.damaged(run_id, step), manifest)\n",
        _ORDER,
        "a run would start from step 0 in silence: deleted before it is put aside",
    ),
    Bug(
        "holdfast/checkpoint/load.py",
        "manifest)\n    fence()\n    store.delete(key)",
        "manifest)\n    store.delete(key)",
        _ORDER,
        "a replaced attempt would delete its successor's root",
    ),
    Bug(
        "holdfast/checkpoint/shard_writer.py",
        "for place in places.values() for each in (place, place.base) if each}",
        "for place in places.values() for each in (place,) if each}",
        _ORDER,
        "a commit could not be loaded: the base of a piece is gone",
    ),
    Bug(
        "holdfast/checkpoint/shard_writer.py",
        "            self._require_packs(step, bases)\n",
        "",
        _ORDER,
        "a commit could not be loaded: the base of a new difference is gone",
    ),
    Bug(
        "holdfast/checkpoint/shard_writer.py",
        "if info is None or info.size < pack.size:",
        "if info is None:",
        _ORDER,
        "a commit could not be loaded: a pack is shorter than it was",
    ),
    Bug(
        "holdfast/checkpoint/local_tiers/peers.py",
        "for key in [*keys, index]:",
        "for key in [index, *keys]:",
        _ORDER,
        "the neighbour would prune its last whole copy: the index before the packs",
    ),
    Bug(
        "holdfast/checkpoint/local_tiers/peers.py",
        "            keys.append(record)\n        try:\n            for key in [*keys, index]:",
        "            pass\n        try:\n            for key in [*keys, index, record]:",
        _ORDER,
        "the neighbour would count a step without its record as whole",
    ),
    Bug(
        "holdfast/checkpoint/local_tiers/tier_writer.py",
        "for folder in (layout.indexes(run_id), layout.packs(run_id)):\n        keys = [",
        "for folder in (layout.packs(run_id), layout.indexes(run_id)):\n        keys = [",
        _ORDER,
        "a near step that is half removed would look whole",
    ),
    Bug(
        "holdfast/checkpoint/local_tiers/tier_writer.py",
        "        oldest = whole[-KEPT]",
        "        oldest = whole[-1]",
        _ORDER,
        "one whole near step would be kept and not two",
    ),
    Bug(
        "holdfast/checkpoint/commit.py",
        "        attach()\n        self._attempt.check(self._store)\n        self._put_root(manifest, same_bits)\n",
        "        attach()\n        self._put_root(manifest, same_bits)\n",
        _ORDER,
        "an attempt that was replaced while it wrote its metrics would commit",
    ),
    Bug(
        "holdfast/checkpoint/commit.py",
        "        attach()\n        self._attempt.check(self._store)\n        self._put_root(manifest, same_bits)\n",
        "        self._attempt.check(self._store)\n        self._put_root(manifest, same_bits)\n        attach()\n",
        _ORDER,
        "a checkpoint would be there without the metrics of its steps",
    ),
    Bug(
        "holdfast/checkpoint/writer.py",
        "if not isinstance(failure, HungError):  # which may wake up, and read the buffer",
        "if failure:",
        _WAITS,
        "the buffer of a hung copy would be used again: torn state",
    ),
    Bug(
        "holdfast/checkpoint/lease.py",
        "        if self._seen is None or self._seen[0] != version:\n",
        "        if self._seen is None:\n",
        _LEASE,
        "two collectors: a holder that renews would be followed",
    ),
    Bug(
        "holdfast/checkpoint/lease.py",
        "now - self._seen[1] >= LEASE_SECONDS",
        "now - self._seen[1] > LEASE_SECONDS",
        _LEASE,
        "a lease would be held past its time",
    ),
    Bug(
        "holdfast/checkpoint/lease.py",
        "told.attempt < self._attempt or",
        "told.attempt <= self._attempt or",
        _LEASE,
        "two collectors of one attempt",
    ),
    Bug(
        "holdfast/checkpoint/lease.py",
        """any more.\"\"\"
        try:
            self._version = self._swap(self._version, held=True)""",
        """any more.\"\"\"
        try:
            self._version = self._swap(self._store.get_versioned(self._key)[1], held=True)""",
        _LEASE,
        "two collectors: one that was followed would take its lease back by a renewal",
    ),
    Bug(
        "holdfast/components/train/engines/torch/engine.py",
        "self._balance.step(held)",
        "self._balance.step()",
        _STEP,
        "router biases would move on a step that is held back",
    ),
    Bug(
        "holdfast/components/train/engines/torch/engine.py",
        "update(self._optimizer, held)",
        "update(self._optimizer, None)",
        _STEP,
        "a step that is held back would update the weights",
    ),
    Bug(
        "holdfast/components/train/engines/torch/engine.py",
        "        total = total / self._mesh.averaged\n",
        "        total = total / self._mesh.data\n",
        _STEP,
        "the loss would be scaled under a pipeline with parts of sequences",
    ),
    Bug(
        "holdfast/components/train/engines/torch/engine.py",
        "share = self._upscaled(self._mesh.averaged / counted)\n            total = pipeline",
        "share = self._upscaled(self._mesh.data / counted)\n            total = pipeline",
        _STEP,
        "gradients would be scaled under a pipeline with parts of sequences",
    ),
    Bug(
        "holdfast/components/train/engines/torch/engine.py",
        "return total if self._loss_scale is None else total / self._loss_scale.scale",
        "return total",
        _STEP,
        "the loss of a pipeline would be reported with the scale of fp16",
    ),
    Bug(
        "holdfast/components/train/engines/torch/elastic.py",
        "leaves = min(grid.ranks, grid.grains - self._round * grid.ranks)",
        "leaves = grid.ranks",
        _STEP,
        "elastic would not be elastic: the spare grain is added",
    ),
    Bug(
        "holdfast/components/train/engines/torch/elastic.py",
        "            output_tensor.copy_(total)\n            self._partial, self._round = PartialSums(), 0",
        "            output_tensor.copy_(total)\n            self._partial = PartialSums()",
        _STEP,
        "the second step of elastic shards would not begin as the first",
    ),
    Bug(
        "holdfast/components/train/engines/preference.py",
        "return torch.where(there, -F.logsigmoid(beta * margin), 0.0).sum()",
        "return (-F.logsigmoid(beta * margin)).sum()",
        _PAIRS,
        "pairs that are not there would add log 2 each",
    ),
    Bug(
        "holdfast/components/train/engines/preference.py",
        "margin = gained[:, 0::2] - gained[:, 1::2]",
        "margin = gained[:, 1::2] - gained[:, 0::2]",
        _PAIRS,
        "the model would learn what was rejected",
    ),
    Bug(
        "holdfast/components/train/engines/preference.py",
        "    pairs = (counts[:, 0::2] > 0).sum() * speaks",
        "    pairs = (counts > 0).sum() * speaks",
        _PAIRS,
        "the loss of a step would be divided by twice its pairs",
    ),
    Bug(
        "holdfast/exchange/universal.py",
        'MOMENTS[0]: "exp_avg.pt", MOMENTS[1]: "exp_avg_sq.pt"',
        'MOMENTS[1]: "exp_avg.pt", MOMENTS[0]: "exp_avg_sq.pt"',
        _UNIVERSAL,
        "the moments of a universal checkpoint would be swapped",
    ),
    Bug(
        "holdfast/store/durable.py",
        "    folder.mkdir(exist_ok=True)\n    sync_folder(folder.parent)\n",
        "    folder.mkdir(exist_ok=True)\n",
        _FOLDERS,
        "a new folder would be gone after a power loss",
    ),
    Bug(
        "holdfast/store/durable.py",
        "    make_folder(folder.parent)\n    make_home_of(folder)\n    folder.mkdir(exist_ok=True)\n",
        "    make_home_of(folder)\n    folder.mkdir(exist_ok=True, parents=True)\n",
        _FOLDERS,
        "the parents of a new folder would be gone after a power loss",
    ),
    Bug(
        "holdfast/store/s3_writes.py",
        "max(parts.PART_BYTES, -(-size // parts.MOST_PARTS))",
        "max(parts.PART_BYTES, size // parts.MOST_PARTS)",
        _PARTS,
        "10,001 parts would be refused at the end of an upload",
    ),
    Bug(
        "holdfast/store/s3_writes.py",
        "max(parts.PART_BYTES, -(-size // parts.MOST_PARTS))",
        "parts.PART_BYTES",
        _PARTS,
        "an object of more than 10,000 parts would be refused at the end of an upload",
    ),
    Bug(
        "holdfast/model/generate.py",
        "text = text[-(decoder.shape.context // 2) :]",
        "text = text[: decoder.shape.context // 2]",
        _GENERATE,
        "nonsense text: the wrong half kept at full context",
    ),
    Bug(
        "holdfast/model/generate.py",
        "cache[0].positions == decoder.shape.context:",
        "cache[0].positions == decoder.shape.context - 1:",
        _GENERATE,
        "the context would be cut before it is full",
    ),
    Bug(
        "holdfast/components/train/plan.py",
        r"|NCCL_(ALGO|PROTO|",
        r"|NCCL_(PROTO|",
        _TRAIN_PLAN,
        "an exact run would go on under another algorithm of NCCL",
    ),
    Bug(
        "holdfast/components/train/plan.py",
        '"image": os.environ.get(IMAGE_VARIABLE) or MISSING,',
        '"image": MISSING,',
        _TRAIN_PLAN,
        "an exact run would go on in another image",
    ),
    Bug(
        "holdfast/checkpoint/fork.py",
        """    store.put(layout.parent(borrower), json.dumps(parent).encode())
    number = attempt.number
""",
        """    number = attempt.number
    store.put_if_absent(layout.checkpoint(borrower, step), data)
    store.put(layout.parent(borrower), json.dumps(parent).encode())
""",
        _BORROW,
        "a run that was forked would have a checkpoint before it has a parent",
    ),
]
