"""Registered models: list, promote, roll back, serve, and generate text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.api.submission import open_store_at
from holdfast.spec import HoldfastError, Spec
from holdfast.spec.errors import MissingError, UsageError
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.serving import Published
    from holdfast.tracking import Champion


@dataclass(frozen=True)
class NewChampion:
    """The result of a promotion or a rollback. The alias has moved, also if `not_served` is an error."""

    champion: Champion
    published: Published | None = None  # the systems that serve it now; None if the spec names none
    not_served: HoldfastError | None = None


@dataclass(frozen=True)
class ServedChampion:
    """The result of serving a champion for a spec."""

    champion: Champion
    published: Published | None  # None in a dry run
    objects: tuple[object, ...] = ()  # of a dry run
    registry: str = ""  # address of the Model Registry that a dry run would use


def models(store: str | Store = "") -> Sequence[tuple[Champion, Sequence[str]]]:
    """The versions of all registered models, with their aliases. Never creates an MLflow database."""
    from holdfast.runtime.environment import has_mlflow
    from holdfast.tracking import registered

    return registered(open_store_at(store)) if has_mlflow() else ()


def promote(version: str, store: str | Store = "") -> NewChampion:
    """Make MODEL/VERSION the champion, and update the systems that serve the model."""
    from holdfast.tracking import promote as promoted

    model, slash, number = version.rpartition("/")
    if not slash or not model or not number.isdecimal():
        raise UsageError(f"{version!r} is not MODEL/VERSION, such as quickstart/3")
    opened_store = open_store_at(store)
    return _published(promoted(model, int(number), opened_store), opened_store)


def rollback(model: str, store: str | Store = "") -> NewChampion:
    """Restore the previous champion, and update the systems that serve the model."""
    from holdfast.tracking import rollback as rolled_back

    opened_store = open_store_at(store)
    return _published(rolled_back(model, opened_store), opened_store)


def serve(spec: Spec, *, store: str = "", dry_run: bool = False) -> ServedChampion:
    """Serve the champion as the section `serving` of a spec sets. Repeating it is safe. Raises MissingError."""
    from holdfast.runtime.secrets import redact
    from holdfast.serving import deployment_of, inference_service_of, publish
    from holdfast.tracking import champion, trusted_stores

    opened_store = open_store_at(store or spec.store or "")
    current = champion(spec.registered_model, trusted_stores(spec, opened_store))
    if current is None:
        raise MissingError(f"registered model {spec.registered_model!r} has no champion: register or promote one")
    if not dry_run:
        return ServedChampion(current, publish(spec, current, champion=True))
    objects: tuple[object, ...] = (inference_service_of(spec, current),) if spec.serving.kserve is not None else ()
    if spec.serving.deployment is not None:
        objects += deployment_of(spec, current)
    registry = "" if spec.serving.model_registry is None else redact(spec.serving.model_registry.url)
    return ServedChampion(current, None, objects, registry)


def generate(
    model: str, prompt: str, *, tokens: int = 64, temperature: float = 0.8, seed: int = 0, store: str | Store = ""
) -> str:
    """A continuation of `prompt` by a run, a registered model (name, name@alias, name/version) or a folder.

    Temperature 0 picks the most likely token each time. Raises MissingError.
    """
    from holdfast.pipelines.view.models import locate

    files = locate(model, open_store_at(store))  # before torch is imported
    from holdfast.model.generate import generate as continued
    from holdfast.model.hugging_face import load_exported

    decoder, tokenizer = load_exported(files)
    return continued(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)


def _published(champion: Champion, store: Store) -> NewChampion:
    from holdfast.serving import publish, settings_of

    try:
        settings = settings_of(champion.model, store)
        return NewChampion(champion, publish(settings, champion, champion=True) if settings is not None else None)
    except HoldfastError as error:
        return NewChampion(champion, not_served=error)
