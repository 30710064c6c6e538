"""What could go wrong when attempts meet: these are for the simulation and the crash points, which know no unit."""

from __future__ import annotations

from tests.planted.bug import Bug

_PROTOCOL = "tests/protocol/test_simulation.py tests/protocol/test_crashes.py"

BUGS = [
    Bug(
        "holdfast/telemetry/lineage.py",
        "return max([(writer_of(step) or 0, step) for step in steps[:-1]] + [(writer, highest)])[1]",
        "return highest",
        f"{_PROTOCOL} tests/checkpoint/test_attempts.py tests/telemetry/test_history.py",
        "the protocol would go on from what a replaced attempt committed late",
    ),
    Bug(
        "holdfast/checkpoint/shard_writer.py",
        'contents = blake3(b"".join(map(named, group, laid))).digest(16)',
        'contents = blake3(b"").digest(16)',
        _PROTOCOL,
        "the protocol would use the name of a pack again",
    ),
    Bug(
        "holdfast/checkpoint/commit.py",
        "if self._store.put_if_absent(key, manifest.to_bytes()):\n            return",
        "if self._store.put(key, manifest.to_bytes()) is None:\n            return",
        _PROTOCOL,
        "a replaced attempt would write over its successor's root: the protocol",
    ),
    Bug(
        "holdfast/checkpoint/commit.py",
        "        attach()\n",
        "",
        _PROTOCOL,
        "the protocol would forget what is attached to a checkpoint",
    ),
    Bug(
        "holdfast/checkpoint/damage_reports.py",
        "if confirmed := sorted(rank for each in verdicts for rank, fails in each.items() if fails):",
        "if confirmed := sorted(suspects):",
        _PROTOCOL,
        "one reader that lies would set a checkpoint aside: the protocol",
    ),
    Bug(
        "holdfast/store/sequence.py",
        "while not store.put_if_absent(record_key(folder, number), data):",
        "while store.put(record_key(folder, number), data) is not None:",
        "tests/checkpoint/test_attempts.py",
        "two attempts would hold one number: the protocol",
    ),
]
