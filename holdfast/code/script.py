"""The bundle of a training script: made where the spec is read, published to the store of its run.

The digest of the bundle is then a field of the spec, and is on the command line of every rank. The bundle is kept on
this machine until it is published. A spec that comes from a store is resumed only where its bundle was made, because
write access to a store must not decide what runs.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.code.bundle import IGNORE_FILE, Bundle, make_bundle
from holdfast.code.closure import parse_source, source_text
from holdfast.code.resolve import keep, read_kept, require_in_bundle, with_digests, with_short_command
from holdfast.spec import Spec
from holdfast.spec.errors import Problem, SpecError


def resolve_script(spec: Spec, folder: Path) -> Spec:
    """The spec with the digests of its script's bundle and of its functions. The bundle is kept on this machine. The
    script is relative to `folder`; its own folder is the bundle. Other specs are returned unchanged. Raises
    SpecError."""
    if spec.train.script is None:
        return spec
    if spec.code is not None:  # an override of a spec that was resolved before
        return with_digests(spec, spec.code, read_kept)
    path = folder / spec.train.script
    if not path.is_file():
        remedy = "correct the path, which is relative to the folder of the spec"
        raise SpecError([Problem("train.script", spec.train.script, f"does not exist: {path.absolute()}", remedy)])
    require_in_bundle(spec, folder, path.parent)
    bundle = make_bundle(path.parent, spec.train.include)
    if (fault := _fault(path, bundle)) is not None:
        raise SpecError([Problem("train.script", spec.train.script, *fault)])
    keep(bundle)
    spec = with_short_command(spec, folder, path.parent)
    train = spec.train.model_copy(update={"script": path.name})
    return with_digests(spec.model_copy(update={"train": train}), bundle.digest, lambda _: bundle.data)


def _fault(path: Path, bundle: Bundle) -> tuple[str, str] | None:
    """Why a script cannot run, and the remedy."""
    if path.name not in bundle.paths:
        return f"is left out of the code by {IGNORE_FILE}", "remove it from there"
    try:
        parse_source(source_text(path.read_bytes()), path.name)
    except SyntaxError as error:
        return f"is not valid Python: line {error.lineno or 1}: {error.msg}", "correct it"
    return None
