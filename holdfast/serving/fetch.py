"""Download of an export for a server of models: `python -m holdfast.serving.fetch STORE EXPORT DIGEST FOLDER`.

Each file is written block by block, and each block is checked before the file has its name. Files that are there and
intact are not downloaded again.
"""

import logging
import sys
from pathlib import Path

from holdfast.model.exported import exported_files
from holdfast.model.files import Folder
from holdfast.model.verified import BLOCK_BYTES, VerifiedFiles
from holdfast.spec.errors import HoldfastError, UsageError
from holdfast.store import open_store

log = logging.getLogger("holdfast.serving")


def fetch(store_url: str, export: str, digest: str, folder: Path) -> None:
    """Write the files of the export with this digest into `folder`. Raises MissingError and DataError."""
    files = exported_files(open_store(store_url), export, digest)
    there = VerifiedFiles(Folder(folder), files.record)
    for name, record in sorted(files.record.files.items()):
        target = folder / name
        if target.is_file() and not any(there.damages(name)):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("wb") as file:
            for start in range(0, record.size, BLOCK_BYTES):
                block = bytearray(min(BLOCK_BYTES, record.size - start))
                files.read_into(name, start, memoryview(block))
                file.write(block)
        partial.replace(target)
        log.info("%s: %d bytes", target, record.size)


def main(arguments: list[str]) -> int:
    """The command. Returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if len(arguments) != 4:
            raise UsageError("usage: python -m holdfast.serving.fetch STORE EXPORT DIGEST FOLDER")
        store_url, export, digest, folder = arguments
        fetch(store_url, export, digest, Path(folder))
    except HoldfastError as error:
        log.error("error: %s", error)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
