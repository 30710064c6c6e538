"""What could go wrong where a person looks into a run, goes on from an earlier step of it, or breaks it on purpose."""

from __future__ import annotations

from tests.planted.bug import Bug

_REWIND = "tests/pipelines/test_fork.py"

BUGS = [
    Bug(
        "holdfast/corpus/units.py",
        "done, lines = done + 1, max(lines, at)\n        if document is None:",
        "done, lines, at = done + 1, max(lines, at), done + 1\n        if document is None:",
        "tests/corpus/test_batch.py",
        "a blank line would shift the lines that a batch names",
    ),
    Bug(
        "holdfast/corpus/provenance.py",
        "gap = gap_before(size, left[piece.source])",
        "gap = 0",
        "tests/corpus/test_batch.py",
        "looked into: conversations would be looked for where they are not packed",
    ),
    Bug(
        "holdfast/checkpoint/tools/first_divergence.py",
        "                equal_at = step\n                continue",
        "                equal_at = step\n                break",
        "tests/checkpoint/tools/test_first_divergence.py",
        "looked into: runs that part after their first common checkpoint would be called equal",
    ),
    Bug(
        "holdfast/checkpoint/tools/first_divergence.py",
        "return self.first is None and self.differs_at is None",
        "return self.first is None",
        "tests/checkpoint/tools/test_first_divergence.py",
        "looked into: states that differ behind equal figures would be called equal",
    ),
    Bug(
        "holdfast/checkpoint/gc.py",
        "            for root in pinned:\n",
        "            for root in ():\n",
        "tests/checkpoint/test_pins.py",
        "forked: a collection would take the past of a forked run",
    ),
    Bug(
        "holdfast/checkpoint/shard_writer.py",
        " and (began := open_checkpoint(self._store, run_id, start)).manifest.holder == run_id:",
        " and (began := open_checkpoint(self._store, run_id, start)):",
        "tests/checkpoint/test_fork.py",
        "forked: the first save of a forked run would refer to packs that it has not",
    ),
    Bug(
        "holdfast/checkpoint/fork.py",
        '"bytes_of": source.holder,',
        '"bytes_of": run_id,',
        _REWIND,
        "forked: a run that was forked twice would be looked for in the one between",
    ),
    Bug(
        "holdfast/components/train/audit/replay_job.py",
        "if there[name] != row[name]]",
        "if there[name] != row[name] and name != 'loss']",
        "tests/train/test_replay.py",
        "replayed: a figure that differs would not be named",
    ),
    Bug(
        "holdfast/components/train/audit/replay_rank.py",
        "if plan is not None and here.fingerprint != plan.fingerprint:",
        "if plan is None:",
        "tests/train/test_replay.py",
        "replayed: another machine would be compared with as if it were the same",
    ),
    Bug(
        "holdfast/pipelines/chaos/compare.py",
        "if result.state_digest != asked.calm.state_digest:",
        "if not result.state_digest:",
        "tests/pipelines/chaos",
        "chaos: a storm that changed the bits would be called equal",
    ),
    Bug(
        "holdfast/store/s3_errors.py",
        "Meaning.FULL: (NoSpaceError",
        "Meaning.FULL: (StoreRefusedError",
        "tests/store/test_s3_faults.py",
        "chaos: a full store would end a training for good",
    ),
]
