"""Identity of imported weights (`model.init_from`): their content, not their location.

Needs no torch, because identifying a run must be quick.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from holdfast.model.hub import hub_digests, is_hub
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import open_store


def is_weight_file(name: str) -> bool:
    """Whether a file of a Hugging Face folder determines the weights."""
    return "/" not in name and (
        name.endswith(".safetensors") or name in ("config.json", "model.safetensors.index.json")
    )


def weights_digest(location: str | None) -> str:
    """A digest of the weights in `model.init_from`, for `run_id`. Empty without such weights.

    It covers the content of a folder, the object versions on S3, or the file digests of the Hub. So nothing is
    downloaded. Raises MissingError if no weights are found.
    """
    if location is None:
        return ""
    if is_hub(location):
        found = hub_digests(location, is_weight_file)
    elif location.startswith("s3://"):
        objects = [info for info in open_store(location).list("") if is_weight_file(info.key)]
        found = [f"{info.key} {info.size} {info.version}" for info in objects]
    else:
        folder = Path(location.removeprefix("file://")).expanduser()
        files = sorted(path for path in folder.glob("*") if is_weight_file(path.name))
        found = [f"{path.name} {blake3().update_mmap(path).hexdigest()}" for path in files]
    if not any(".safetensors " in line for line in found):
        raise MissingError(f"model.init_from: {location} has no .safetensors; name a folder in the Hugging Face layout")
    return blake3("\n".join(found).encode()).hexdigest()


def require_weights(location: str, named: str) -> None:
    """Raises DataError unless the weights at `location` have the digest `named` from the run's identity."""
    if (found := weights_digest(location)) != named:
        raise DataError(
            f"model.init_from: {location} holds other weights ({found[:16]}) than those the run id was made from "
            f"({named[:16]}). Put them back, or run the same command again, which names another run"
        )
