"""The bundle of a training script: made where the spec is read, published to the store of its run.

The digest of the bundle is then a field of the spec, and is on the command line of every rank. The bundle is kept on
this machine until it is published. A spec that comes from a store is resumed only where its bundle was made, because
write access to a store must not decide what runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

from holdfast.code.bundle import MAX_BYTES, MAX_LISTING, Bundle, digest_of, make_bundle, publish, require_digest
from holdfast.runtime.environment import cache_dir, make_folder
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.store import Store
from holdfast.store.json_reading import read_file_bounded


def resolve_script(spec: Spec, folder: Path) -> Spec:
    """The spec with the digest of its script's bundle, which is kept on this machine. The script is relative to
    `folder`; its own folder is the bundle. Other specs are returned unchanged. Raises SpecError."""
    if spec.train.script is None or spec.code is not None:
        return spec
    path = folder / spec.train.script
    if not path.is_file():
        remedy = "correct the path, which is relative to the folder of the spec"
        raise SpecError([Problem("train.script", spec.train.script, f"does not exist: {path.absolute()}", remedy)])
    bundle = make_bundle(path.parent, spec.train.include)
    file = _kept(bundle.digest)
    if not file.is_file():
        make_folder(file.parent)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".made-", delete=False) as written:
            written.write(bundle.data)
        Path(written.name).replace(file)
    train = spec.train.model_copy(update={"script": PurePosixPath(spec.train.script).name})
    return spec.model_copy(update={"train": train, "code": bundle.digest})


def publish_script(spec: Spec, store: Store) -> None:
    """Put the bundle of a script into the store of its run. Raises MissingError if it was not made on this machine, and
    DataError if its file was changed."""
    if spec.train.script is None or spec.code is None:
        return
    file = _kept(spec.code)
    try:
        data = read_file_bounded(file, MAX_BYTES + MAX_LISTING)
    except MissingError:
        raise MissingError(
            f"{spec.code}: the code of this run was not bundled on this machine, and a store is not trusted with code; "
            "run its spec again from its folder, which resumes the run"
        ) from None
    if digest_of(data) != spec.code:
        raise DataError(f"{file}: was changed; delete it, and run the spec again from its folder")
    publish(store, Bundle(data, ()))


def _kept(digest: str) -> Path:
    require_digest(digest)
    return cache_dir() / "code" / f"{digest.partition(':')[2]}.bundle"
