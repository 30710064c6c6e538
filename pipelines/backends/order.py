"""What is to be run, and what it is called: the same for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from holdfast.components.spec import Spec, SpecError, dump_spec, run_id
from holdfast.components.spec.errors import HoldfastError, Problem
from holdfast.components.spec.identity import digest

ORDER_DIGITS = 8


@dataclass(frozen=True)
class Order:
    """What is to be run."""

    spec: Spec
    store: str = ""  # empty: the spec's, else HOLDFAST_STORE of the pods
    salt: str = ""
    run_id: str = ""  # empty when the sources cannot be read from here
    unread: str = ""  # why not
    service_account: str = ""
    image: str = ""
    replan: bool = False

    def parameters(self) -> dict[str, Any]:
        """The parameters of the DAG, as UIs show them."""
        return {
            "spec": dump_spec(self.spec), "overrides": [], "store": self.store, "salt": self.salt,
            "replan": self.replan,
        }  # fmt: skip

    def name(self, version: str) -> str:
        """The name of the run: the family, the Holdfast run, and a digest of everything else that was asked for."""
        rest = digest([version, self.parameters(), self.service_account])[:ORDER_DIGITS]
        return " ".join(part for part in (self.spec.name, self.run_id, rest) if part)


def order(
    spec: Spec, *, store: str = "", salt: str = "", service_account: str = "", image: str = "", replan: bool = False
) -> Order:
    """Check that a cluster can run the spec, and identify the run if the sources can be read from here."""
    from holdfast.components.corpus import identify
    from holdfast.components.model.imported import weights_digest

    check_for_cluster(spec, store)
    found, unread = "", ""
    try:
        found = run_id(spec, identify(spec), salt, weights_digest(spec.model.init_from))
    except (HoldfastError, OSError) as error:
        unread = str(error)
    return Order(spec, store, salt, found, unread, service_account, image, replan)


def check_for_cluster(spec: Spec, store: str = "") -> None:
    """Raise SpecError for what no pod could find: paths of this machine, and a store in a folder that is not shared."""
    mounts = [PurePosixPath(volume.path) for volume in spec.cluster.volumes]
    remedy = "put it into a bucket, or on a volume of cluster.volumes and write the absolute path there"
    paths = [("data.tokenizer.path", spec.data.tokenizer.path), ("model.init_from", spec.model.init_from)]
    paths += [(f"data.sources.{index}.uri", source.uri) for index, source in enumerate(spec.data.sources)]
    problems = []
    for name, path in paths:
        if path and (":" not in path or path.startswith("file:")) and not _mounted(path, mounts):
            problems.append(Problem(name, path, "is a path that no pod of the cluster has", remedy))
    root = store or spec.store or ""
    if root.startswith("file:") and not _mounted(root, mounts):
        problems.append(Problem("store", root, "is a folder that the pods of the cluster do not share", remedy))
    if problems:
        raise SpecError(problems, "spec, for a cluster")


def _mounted(path: str, mounts: Sequence[PurePosixPath]) -> bool:
    place = PurePosixPath(path.removeprefix("file://"))
    return any(place.is_relative_to(mount) for mount in mounts)
