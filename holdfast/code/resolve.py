"""Code of a spec: the functions that it names are checked, bundled and given their digests, without import.

`load_spec` does this where a spec is read from its file. From then on the spec has the digest of the bundle (`code`),
and each function the digest of the source that it reaches. `publish_code` puts the bundle into the store of a run.
`enter_code` makes the functions callable where they run.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.code.bundle import (
    IGNORE_FILE,
    Bundle,
    digest_of,
    fetch_code,
    make_bundle,
    publish,
    read_bundle,
    require_digest,
)
from holdfast.code.closure import role_digest, source_text
from holdfast.code.load import check_function, load_function
from holdfast.runtime.environment import cache_dir, make_folder
from holdfast.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.spec.functions import Function, Named, functions_of
from holdfast.spec.load import Fill, place_problems
from holdfast.spec.load import load_spec as load_without_code
from holdfast.spec.tree import Spec
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_file_bounded

PYTHON = ("python", "python3")  # programs of a command that are this Python
MAX_KEPT = 32 * 2**20  # bytes of a bundle's file on this machine
_entered: list[Path] = []  # the folder of the code that this process runs


def load_spec(path: str | Path, overrides: Iterable[str] = (), fill: Fill | None = None) -> Spec:
    """Read and check a spec, and the code that it names. Raises MissingError, or SpecError with every problem. `fill`
    is that of `parse_spec`."""
    overrides = tuple(overrides)
    spec = load_without_code(path, overrides, fill)
    try:
        return resolve_code(spec, Path(path).parent)
    except SpecError as error:
        raise place_problems(error.problems, Path(path), overrides) from None


def resolve_code(spec: Spec, folder: Path) -> Spec:
    """The spec with the digest of its code, and of each function. Files are relative to `folder`.

    The bundle is kept on this machine for `publish_code`. A spec without functions, or that has its digests, is
    returned unchanged. Raises SpecError with every problem.
    """
    named, command = list(functions_of(spec)), spec.evaluation.command
    if spec.train.script is not None or not (named or command):
        return spec
    if spec.code is not None:
        return with_digests(spec, spec.code, read_kept)
    places = _places(spec, named, folder)
    folders = {os.path.normpath(place.parent) for _, _, place in places}
    if len(folders) > 1:
        remedy = "put the files of all functions and commands into one folder; it becomes the bundle"
        field, written, _ = places[-1]
        raise SpecError([Problem(field, written, f"is one of {len(folders)} folders of code", remedy)])
    _require_files(places)
    bundle = make_bundle(Path(folders.pop()) if folders else folder)
    keep(bundle)
    return with_digests(with_short_command(spec, folder), bundle.digest, lambda _: bundle.data)


Place = tuple[str, str, Path]  # a field, its text, and the file that it names


def _places(spec: Spec, named: Sequence[Named], folder: Path) -> list[Place]:
    """The files that functions and the evaluation command name."""
    places = [(f"{each.field}.use", each.function.use, (folder / each.function.file).absolute()) for each in named]
    if file := command_file(spec):
        places.append(("evaluation.command", file, (folder / file).absolute()))
    return places


def _require_files(places: Sequence[Place]) -> None:
    problems = [
        Problem(field, text, f"names a file that does not exist: {place}", "correct it")
        for field, text, place in places
        if not place.is_file()
    ]
    if problems:
        raise SpecError(problems)


def command_file(spec: Spec) -> str:
    """The Python file that the evaluation command runs, relative to the folder of the spec. Empty for another one."""
    program, *rest = spec.evaluation.command or ("",)
    return rest[0] if program in PYTHON and rest and rest[0].endswith(".py") else ""


def with_short_command(spec: Spec, folder: Path, root: Path | None = None) -> Spec:
    """The spec with the evaluation command as it runs in the folder of the bundle. `folder` is that of the spec. `root`
    is that of the bundle; by default it is the folder of the file."""
    if not (file := command_file(spec)):
        return spec
    path = folder / file
    short = os.path.relpath(path, root or path.parent)
    command = (spec.evaluation.command[0], short, *spec.evaluation.command[2:])
    return _changed(spec, {"evaluation.command": list(command)})


def require_in_bundle(spec: Spec, folder: Path, root: Path) -> None:
    """Raises SpecError for a function or an evaluation command outside of `root`, the folder of a script. Functions
    are in files of the folder itself."""
    places = _places(spec, list(functions_of(spec)), folder)
    _require_files(places)
    top = Path(os.path.normpath(root.absolute()))
    remedy = "move it into the folder of train.script, which becomes the bundle"
    problems = []
    for field, text, place in places:
        parent = Path(os.path.normpath(place.parent))
        if not (parent == top or (field == "evaluation.command" and parent.is_relative_to(top))):
            problems.append(Problem(field, text, f"is not in the folder of train.script, {top}", remedy))
    if problems:
        raise SpecError(problems)


def with_digests(spec: Spec, code: str, read: Callable[[str], bytes]) -> Spec:
    """The spec with the digest of its code, and of each function. `read` gives the bytes of a bundle by its digest.
    Returned unchanged if it has all of them."""
    named = list(functions_of(spec))
    if spec.code == code and all(each.function.digest for each in named):
        return spec
    files = _texts(read_bundle(read(code), code))
    if (file := command_file(spec)) and file not in files:
        message, remedy = f"is left out of the code by {IGNORE_FILE}", "remove it from there"
        raise SpecError([Problem("evaluation.command", file, message, remedy)])
    return _with_digests(spec, named, files, code)


def _texts(files: Sequence[Any]) -> dict[str, str]:
    return {file.path: source_text(file.data) for file in files if file.path.endswith(".py")}


def _with_digests(spec: Spec, named: Sequence[Named], files: Mapping[str, str], code: str) -> Spec:
    """The spec with all digests. Raises SpecError for functions that cannot be called as it says."""
    problems, digests = [], {}
    for each in named:
        function = each.function
        use = f"{Path(function.file).name}:{function.function_name}"
        if fault := check_function(files, use, each.role.given, function.keywords, is_class=each.role.is_class):
            remedy = "correct the name, the arguments, or the function (docs/your-own-code.md)"
            problems.append(Problem(f"{each.field}.use", function.use, fault, remedy))
        else:
            digests[each.field] = {"use": use, "digest": role_digest(files, use)}
    if problems:
        raise SpecError(problems)
    changes: dict[str, Any] = {"code": code}
    for each in named:
        given = each.function.model_dump(exclude_unset=True)
        changes[each.field] = {**given, **digests[each.field]}
    return _changed(spec, changes)


def _changed(spec: Spec, changes: Mapping[str, Any]) -> Spec:
    """The spec with some fields set, which keeps what its author wrote apart from the defaults."""
    tree = spec.model_dump(mode="json", exclude_unset=True)
    for field, value in changes.items():
        node: Any = tree
        *path, last = field.split(".")
        for name in path:
            node = node[int(name) if isinstance(node, list) else name]
        node[int(last) if isinstance(node, list) else last] = value
    return Spec.model_validate(tree)


# Bundles on this machine


def keep(bundle: Bundle) -> None:
    """Keep a bundle on this machine until it is published."""
    file = _file_of(bundle.digest)
    if file.is_file() and file.stat().st_size == len(bundle.data):
        return
    make_folder(file.parent)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".made-", delete=False) as written:
        written.write(bundle.data)
    Path(written.name).replace(file)


def is_kept(digest: str) -> bool:
    """Whether this machine made, or published, the bundle."""
    return _file_of(digest).is_file()


def read_kept(digest: str) -> bytes:
    """The bytes of a bundle that was made on this machine. Raises MissingError if it was not, and DataError if its file
    was changed."""
    try:
        data = read_file_bounded(_file_of(digest), MAX_KEPT)
    except MissingError:
        raise MissingError(
            f"{digest}: the code of this run was not bundled on this machine, and a store is not trusted with code; "
            "run its spec again from its folder, which resumes the run"
        ) from None
    if digest_of(data) != digest:
        raise DataError(f"{_file_of(digest)}: was changed; delete it, and run the spec again")
    return data


def _file_of(digest: str) -> Path:
    require_digest(digest)
    return cache_dir() / "code" / f"{digest.partition(':')[2]}.bundle"


def keep_submitted(request: str) -> None:
    """Remember that a request with code was submitted from this machine. `request` is its digest."""
    file = _submitted(request)
    make_folder(file.parent)
    file.touch()


def is_submitted(request: str) -> bool:
    """Whether a request with code was submitted from this machine. `request` is its digest."""
    return _submitted(request).is_file()


def require_submitted(request: str, source: str) -> None:
    """Raises MissingError for a request with code that was read from a store, unless exactly it was submitted from this
    machine. Write access to a store must not change the code, its arguments or its environment."""
    if not is_submitted(request):
        raise MissingError(
            f"{source}: its spec in the store is none that was submitted from this machine, and a store is not trusted "
            "with the arguments of your code; run its spec again from its folder, which resumes the run"
        )


def _submitted(request: str) -> Path:
    return cache_dir() / "code" / "submitted" / request


def require_known_code(spec: Spec, source: str) -> None:
    """Raises MissingError for a spec that was read from a store, if its code was not bundled on this machine. Write
    access to a store must not decide what runs."""
    if spec.code is not None and not is_kept(spec.code):
        raise MissingError(
            f"{source}: its code {spec.code} was not bundled on this machine, and a store is not trusted with code; "
            "run its spec again from its folder, which resumes the run"
        )


def publish_code(spec: Spec, store: Store) -> None:
    """Make sure that the bundle of a spec is in the store. Raises MissingError if neither has it."""
    if spec.code is None:
        return
    if is_kept(spec.code):
        publish(store, Bundle(read_kept(spec.code), ()))
    elif store.stat(layout.code(spec.code)) is None:
        raise MissingError(
            f"{store.url}/{layout.code(spec.code)}: the code of this run is neither there nor on this machine; run its "
            "spec again from its folder"
        )


# Where functions run


def enter_code(store: Store, digest: str | None) -> None:
    """Make the functions of a bundle callable in this process. `digest` comes from the command line of the job."""
    if digest is not None:
        _entered[:] = [fetch_code(store, digest)]


def entered_folder() -> str:
    """The folder of the code that this process runs. Empty without code."""
    return str(_entered[0]) if _entered else ""


def bind(function: Function, folder: str = "") -> Callable[..., Any]:
    """A function of user code with its arguments. `folder` is that of its bundle; default: the entered one. Raises
    UserCodeError if it cannot be imported, and DataError if it reaches other source than its digest says."""
    if not folder and not _entered:
        raise DataError(f"{function.use}: no code was loaded for it; submit the spec from its folder")
    root = Path(folder) if folder else _entered[0]
    texts = {file.relative_to(root).as_posix(): source_text(file.read_bytes()) for file in root.rglob("*.py")}
    if role_digest(texts, function.use) != function.digest:
        raise DataError(f"{function.use}: its source is not the one of the run's identity; submit the spec again")
    return partial(load_function(root, function.use), **function.keywords)
