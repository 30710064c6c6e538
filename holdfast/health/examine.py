"""Examination of a gang: every rank is probed at the same time, and all reach the same report.

It always ends: each probe has its share of the seconds. Rank 0 names a rank that does not reach the next probe. A rank
that is lost within a collective ends it after the gang's timeout. Rates that look too slow are measured again before
they are reported.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.collectives import Gang
from holdfast.health import compute, machine
from holdfast.health.compute import exact_product_is_right, pair_links, product_bits, ring_rate
from holdfast.health.verdict import Link, Measured, Probe, Report, judge
from holdfast.launch.device import device_name
from holdfast.runtime.node import node_name
from holdfast.spec.errors import LostPeerError, UnhealthyNodeError, WrongArithmeticError
from holdfast.store import Store

PATIENCE = 60.0  # seconds beyond its share that a rank may need to the next probe: the slowest disk, the first kernels
_RATES = ("compute", "memory", "link", "disk", "store")
_COMPUTE, _MEMORY = 0.3, 0.2  # shares of the seconds; links, disk and store move fixed amounts


def examine(
    gang: Gang, device: torch.device, store: Store | None, prefix: str, folder: Path, seconds: float, why: str = ""
) -> Report:
    """Probe every rank, and return the same report on all. A collective call, after the ranks have met.

    `prefix`: of the keys that are written to the store and deleted. `folder`: on the disk to probe. `seconds`: for the
    probes that run for a given time. If ranks do not reach a probe, raises HungError on rank 0, which names them, and
    LostPeerError on other ranks.
    """
    began, start = time.time(), time.monotonic()
    patience = seconds + PATIENCE

    def together(probe: str) -> None:
        gang.meet(patience, f"in the health check, before the probe of {probe}")

    together("arithmetic")
    own = _identified(gang, device)
    together("compute")
    rates: dict[Probe, float] = {"compute": compute.compute_rate(device, _COMPUTE * seconds)}
    together("memory")
    rates["memory"] = compute.memory_rate(device, _MEMORY * seconds)
    own = own.model_copy(update={"rates": rates})
    links: tuple[Link, ...] = ()
    ring = None
    if gang.size > 1:
        together("links")
        ring, links = ring_rate(gang, device), pair_links(gang, device)
    together("disk and store")
    if first_of_node():
        own = _with_node(own, store, prefix, folder)
    measured = gang.all_gather(own, Measured)
    findings = judge(measured, links)
    if any(finding.severity == "failed" and finding.probe in _RATES for finding in findings):
        together("what was slow")
        rates = {"compute": compute.compute_rate(device, _COMPUTE * seconds)}
        rates["memory"] = compute.memory_rate(device, _MEMORY * seconds)
        second = own.model_copy(update={"rates": rates})
        second = _with_node(second, store, prefix, folder) if first_of_node() else second
        better = {probe: max(rate, own.rates[probe]) for probe, rate in second.rates.items()}
        measured = gang.all_gather(second.model_copy(update={"rates": better}), Measured)
        links = _better(links, pair_links(gang, device)) if gang.size > 1 else links
        findings = judge(measured, links)
    _release(device)
    report = Report(
        began=began,
        seconds=time.monotonic() - start,
        measured=tuple(measured),
        links=links,
        ring=ring,
        findings=findings,
        why=why,
    )
    return gang.broadcast(report, Report)


def require_health(report: Report, rank: int) -> None:
    """Raises UnhealthyNodeError on ranks that failed, WrongArithmeticError on suspects of which an unknown one computes
    wrong, and LostPeerError on other ranks. Raises nothing if no rank failed."""
    if not report.failures:
        return
    message = f"the health check found: {'; '.join(finding.words for finding in report.failures)}"
    own = [finding for finding in report.failures if rank in finding.ranks]
    if not own:
        raise LostPeerError(message)
    kind = UnhealthyNodeError if any(finding.sure for finding in own) else WrongArithmeticError
    raise kind(f"{message}. The run does not start here: repair or replace the node")


def first_of_node() -> bool:
    """Whether this rank probes its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _identified(gang: Gang, device: torch.device) -> Measured:
    """This rank's identity, and whether it computes correctly."""
    name, notes = device_name(device), []
    capability = torch.backends.cpu.get_cpu_capability()
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    counters, versions, more_notes = machine.counters(device.type, uuid)
    notes += more_notes
    versions |= {"torch": torch.__version__, "device": name}
    if device.type == "cuda":
        versions |= {"CUDA": torch.version.cuda or f"ROCm {torch.version.hip}"}
        versions |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        versions |= {"cuDNN": str(torch.backends.cudnn.version())}
    same_kind = " | ".join(
        (name, platform.machine(), capability, str(torch.get_num_threads()), *sorted(versions.values()))
    )
    return Measured(
        rank=gang.rank,
        node=node_name(),
        device=name,
        kind=device.type,
        right=exact_product_is_right(device),
        bits=product_bits(device),
        alike=same_kind,
        counters=counters,
        versions=versions if first_of_node() else {},
        notes=tuple(notes),
    )


def _with_node(mine: Measured, store: Store | None, prefix: str, folder: Path) -> Measured:
    node = machine.disk_and_store(folder, store, prefix, compute.clock)
    return mine.model_copy(
        update={
            "rates": {**mine.rates, **node.rates},
            "clock_ahead": node.clock_ahead,
            "clock_error": node.clock_error,
            "versions": {**mine.versions, **machine.system_versions()},
            "notes": (*mine.notes, *node.notes),
        }
    )


def _better(first: tuple[Link, ...], second: tuple[Link, ...]) -> tuple[Link, ...]:
    return tuple(link if link.rate >= other.rate else other for link, other in zip(first, second, strict=True))


def _release(device: torch.device) -> None:
    """Free the memory of the probes before a model is made."""
    release: Callable[[], None] | None = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if release is not None and device.type != "cpu":
        release()
