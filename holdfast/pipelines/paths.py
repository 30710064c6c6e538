"""A spec on the machine that submits it: `model.from` and digests of code are filled in, local paths become absolute.

Steps may run elsewhere. They read a spec without `model.from`, and paths that do not depend on a working directory.

The bundle of a training script is made here, and published to the store of its run. Its digest is then a field of the
spec, and on the command line of every rank. Until then it is kept on this machine. A spec from a store is resumed only
where its bundle was made: write access to a store must not decide what runs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.code.bundle import IGNORE_FILE, Bundle, make_bundle
from holdfast.code.closure import parse_source, source_text
from holdfast.code.resolve import keep, read_kept, require_in_bundle, with_digests, with_short_command
from holdfast.code.resolve import load_spec as load_plain_spec
from holdfast.spec import Spec
from holdfast.spec.data import Data, Source
from holdfast.spec.errors import Problem, SpecError, UsageError
from holdfast.spec.load import place_problems, written_leaves
from holdfast.spec.rollout import Reward


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """Read and check a spec, with the fields of `model.from` and the digests of its code filled in. Raises
    MissingError, DataError, SpecError."""
    return load_filled(path, overrides)[0]


def load_filled(path: str | Path, overrides: Iterable[str] = ()) -> tuple[Spec, dict[str, Any]]:
    """The spec of `load_spec`, and the fields that `model.from` filled in, by dotted name."""
    filled: dict[str, Any] = {}
    overrides = list(overrides)

    def fill(tree: dict[str, Any]) -> list[Problem]:
        written = dict(written_leaves(tree))
        problems = fill_from_model(tree)
        filled.update({name: value for name, value in written_leaves(tree) if written.get(name) != value})
        return problems

    spec = load_plain_spec(path, overrides, fill)
    if spec.model.init_from is not None and not filled:
        from holdfast.corpus.starting_model import problems_with_start

        if problems := problems_with_start(spec, remote=False):
            raise place_problems(problems, Path(path), overrides)
    try:
        spec = resolve_script(spec, Path(path).parent)
        if spec.train.inputs:
            from holdfast.script.inputs import resolve_inputs

            spec = resolve_inputs(spec, Path(path).parent)
    except SpecError as error:
        raise place_problems(error.problems, Path(path), overrides) from None
    return spec, filled


def fill_from_model(tree: dict[str, Any]) -> list[Problem]:
    """`holdfast.corpus.starting_model`, imported on demand: specs without `model.from` do not need it."""
    from holdfast.corpus.starting_model import fill_from_model as fill

    return fill(tree)


def absolute(path: str) -> str:
    """Make a local path absolute; a path with a scheme (`s3://`, `python:`, `dvc:`) stays as it is."""
    scheme, colon, _ = path.partition(":")
    if colon and scheme.isalnum() and len(scheme) > 1:
        return path
    return str(Path(path).expanduser().absolute())


def store_root(url: str) -> str:
    """The URL of a store from a URL or the path of a folder. Raises UsageError for a URL with one slash."""
    if "://" in url:
        return url
    if not Path(path := absolute(url)).is_absolute():
        remedy = "write a URL with two slashes, such as s3://bucket/prefix, or the path of a folder"
        raise UsageError(f"{url!r} is neither a URL nor a path", "--store", remedy)
    return Path(path).as_uri()


def with_absolute_paths(spec: Spec) -> Spec:
    """Make every local path of the spec absolute, from the working directory. The result describes the same run."""
    if not spec.data.sources:  # a script, whose own paths are resolved when its spec is loaded
        return spec
    data: Data = spec.data.model_copy(update={"sources": tuple(_source(source) for source in spec.data.sources)})
    if data.tokenizer.path:
        tokenizer = data.tokenizer.model_copy(update={"path": absolute(data.tokenizer.path)})
        data = data.model_copy(update={"tokenizer": tokenizer})
    if data.chat.template:
        data = data.model_copy(update={"chat": data.chat.model_copy(update={"template": absolute(data.chat.template)})})
    if (rules := data.cleaning.decontaminate) is not None:
        rules = rules.model_copy(update={"tasks": tuple(map(absolute, rules.tasks))})
        data = data.model_copy(update={"cleaning": data.cleaning.model_copy(update={"decontaminate": rules})})
    model = spec.model
    if model.init_from:
        model = model.model_copy(update={"init_from": absolute(model.init_from)})
    training = spec.training
    if (teacher := training.distillation.teacher) is not None:
        distillation = training.distillation.model_copy(update={"teacher": absolute(teacher)})
        training = training.model_copy(update={"distillation": distillation})
    if any(reward.model for reward in training.grpo.rewards):
        rewards = tuple(map(_reward, training.grpo.rewards))
        training = training.model_copy(update={"grpo": training.grpo.model_copy(update={"rewards": rewards})})
    return spec.model_copy(update={"data": data, "model": model, "training": training})


def _reward(reward: Reward) -> Reward:
    return reward if reward.model is None else reward.model_copy(update={"model": absolute(reward.model)})


def _source(source: Source) -> Source:
    if source.uri.startswith("dvc:"):
        return source.model_copy(update={"repo": absolute(source.repo) if _is_local(source.repo) else source.repo})
    return source.model_copy(update={"uri": absolute(source.uri)})


def _is_local(repo: str) -> bool:
    return "://" not in repo and "@" not in repo


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
