"""What could go wrong with the store."""

from __future__ import annotations

from tests.planted.bug import Bug

_FILE_STORE = "tests/store/test_file.py tests/store/test_contract.py tests/store/test_contract_at_once.py"
_S3 = "tests/store/test_s3_faults.py tests/store/test_contract.py tests/store/test_contract_at_once.py"
_UPLOADS = "tests/store/test_s3_uploads.py"

BUGS = [
    Bug(
        "holdfast/store/file.py",
        "                    write(descriptor)\n                    os.fsync(descriptor)",
        "                    write(descriptor)",
        _FILE_STORE,
        "an object could be empty after a loss of power",
    ),
    Bug(
        "holdfast/store/file.py",
        "move(temporary, path)\n        sync_folder(path.parent)",
        "move(temporary, path)",
        _FILE_STORE,
        "an object could be gone after a loss of power",
    ),
    Bug(
        "holdfast/store/file.py",
        "            if current != expected:",
        "            if False:",
        _FILE_STORE,
        "two writers would both win",
    ),
    Bug(
        "holdfast/store/file.py",
        "if start + length > size:",
        "if start > size:",
        _FILE_STORE,
        "a truncated object would be read as if it were whole",
    ),
    Bug(
        "holdfast/store/file.py",
        "if leftover.stat().st_mtime < oldest:",
        "if True:",
        _FILE_STORE,
        "the files of living writers would be removed",
    ),
    Bug(
        "holdfast/store/s3_errors.py",
        'redact(str(error.response.get("Error", {}).get("Message", "")))',
        'str(error.response.get("Error", {}).get("Message", ""))',
        _S3,
        "a reply may quote what was signed",
    ),
    Bug(
        "holdfast/store/s3_codes.py",
        "SlowDown SlowDownRead",
        "SlowDownRead",
        _S3,
        "a busy S3 would end a run for good",
    ),
    Bug(
        "holdfast/store/s3_errors.py",
        "Meaning.DENIED: (AccessDeniedError",
        "Meaning.DENIED: (StoreRefusedError",
        _S3,
        "a refusal is named with its remedy",
    ),
    Bug(
        "holdfast/store/stream.py",
        "if start == 0:",
        "if start == 0 and self._position == 0:",
        _UPLOADS,
        "an upload that begins anew needs the bytes from the first one",
    ),
    Bug(
        "holdfast/store/s3_writes.py",
        "if folder and folder not in self._swept:",
        "if False:",
        _UPLOADS,
        "what killed writers left would be paid for, forever",
    ),
    Bug(
        "holdfast/store/s3_writes.py",
        'if upload["Initiated"] < oldest and',
        "if",
        _UPLOADS,
        "the uploads of living writers would be ended",
    ),
    Bug(
        "holdfast/store/s3_bodies.py",
        "crc = checksums.crc32c(piece, crc)",
        "crc = checksums.crc32c(piece)",
        _UPLOADS,
        "the server would check the last buffer only",
    ),
    Bug(
        "holdfast/store/s3_reads.py",
        "if seen != first:",
        "if False:",
        "tests/store/test_s3_reads.py",
        "an object could be half of one version and half of another",
    ),
    Bug(
        "holdfast/store/throttle.py",
        "self._free = turn + size / self._rate",
        "self._free = turn",
        "tests/store/test_throttle.py",
        "checkpoints would take the whole network",
    ),
    Bug(
        "holdfast/store/stream.py",
        "self._turn.wait_for(lambda: self._position == start or self._failed)",
        "pass",
        "tests/store/test_contract.py",
        "threads would write each other's bytes",
    ),
    Bug(
        "holdfast/store/stream.py",
        "if self._position == self._size and (",
        "if self._position > self._size and (",
        "tests/store/test_contract.py",
        "an object would lack what goes beyond the size that was said",
    ),
]
