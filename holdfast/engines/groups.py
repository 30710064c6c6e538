"""Parameter groups of the spec, by canonical names: which group a parameter belongs to, and what is frozen."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from holdfast.model.initialise import parameter_shapes, trained
from holdfast.model.lora import adapter_shapes
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.model import Model
from holdfast.spec.training import ParameterGroup, Training

FIELD = "training.optimizer.groups"
_REST = ParameterGroup()


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """The first group that matches the canonical name of a parameter. A group without settings if none does."""
    return next((group for group in groups if fnmatchcase(name, group.match)), _REST)


def require_groups(model: Model, vocabulary: int, training: Training) -> None:
    """Raises SpecError if a group has no parameter, or if no parameter is trained."""
    if not (groups := training.optimizer.groups):
        return
    names = trained_names(model, vocabulary, training)
    used = {id(group_of(name, groups)) for name in names}
    for index, group in enumerate(groups):
        if id(group) not in used:
            matching = any(fnmatchcase(name, group.match) for name in names)
            message = "has only parameters of earlier groups" if matching else "matches no trained parameter"
            remedy = "move it up, or remove it" if matching else f"use a pattern of names such as {names[0]}"
            raise SpecError([Problem(f"{FIELD}[{index}].match", group.match, message, remedy)])
    if all(group_of(name, groups).frozen for name in names):
        raise SpecError([Problem(f"{FIELD}[0].frozen", True, "leaves no parameter to train", "freeze fewer")])


def trained_names(model: Model, vocabulary: int, training: Training) -> list[str]:
    """The canonical names of the parameters that the groups divide: the adapters, or else the weights."""
    if training.lora.rank is not None:
        return list(adapter_shapes(model, vocabulary, training.lora))
    return [name for name in parameter_shapes(model, vocabulary) if trained(name)]
