"""Performance of accelerators, their nodes and the network between nodes, from the makers' data sheets.

An accelerator that is not in the table is refused, never guessed. A YAML file with the same fields describes another
one, or measured figures of this one. All rates are dense (no structured sparsity), per accelerator, in one direction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from holdfast.spec import strict_yaml
from holdfast.spec.errors import MissingError, Problem, SpecError
from holdfast.spec.section import Section

GB = 1e9


Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "point_to_point"]


class Line(Section):
    """A measured collective: `alpha` seconds per round of messages, and `beta` bytes per second."""

    collective: Collective
    ranks: int = Field(ge=2, description="Of the group.")
    alpha: float = Field(ge=0, description="Seconds of a round.")
    beta: float = Field(gt=0, description="Bytes a second.")


class Accelerator(Section):
    """One accelerator in its usual node. Every figure can be replaced."""

    name: str = Field(description="What it is called.")
    kind: str = Field("nvidia", description="`cluster.accelerator` of the spec: nvidia, amd, gaudi, ascend or cpu.")
    bf16: float = Field(gt=0, description="FLOP/s of matrix products in bf16.")
    fp8: float | None = Field(None, gt=0, description="FLOP/s of matrix products in fp8, where it knows them.")
    fp32: float = Field(gt=0, description="FLOP/s in fp32.")
    memory: float = Field(gt=0, description="Bytes of memory.")
    bandwidth: float = Field(gt=0, description="Bytes a second of its memory.")
    node: int = Field(8, ge=1, le=1024, description="Accelerators that fast links join: a node, or a rack of them.")
    link: float = Field(gt=0, description="Bytes a second to the others of the node, in one direction.")
    network: float = Field(gt=0, description="Bytes a second to other nodes, its share of the node's adapters.")
    link_latency: float = Field(3e-6, ge=0, description="Seconds until the first byte within the node.")
    network_latency: float = Field(10e-6, ge=0, description="Seconds until the first byte between nodes.")
    watts: float = Field(ge=0, description="Power at full load.")
    overhead_watts: float = Field(350.0, ge=0, description="Its share of the node's processors, fans and adapters.")
    price: float = Field(0.0, ge=0, description="Price of an hour. A round figure: replace it by yours.")
    spot_price: float | None = Field(None, ge=0, description="Price of an hour on a spot node.")
    spot_interruptions: float | None = Field(None, ge=0, description="How often a spot node is taken back an hour.")
    kilowatt_hour: float = Field(0.0, ge=0, description="Price of a kilowatt-hour, if it is paid for apart.")
    carbon: float | None = Field(None, ge=0, description="Grams of carbon dioxide of a kilowatt-hour.")
    reach: float = Field(0.7, gt=0, le=1, description="Share of the peak that large matrix products reach.")
    attention_reach: float = Field(0.5, gt=0, le=1, description="The same of attention's kernels.")
    bandwidth_reach: float = Field(0.8, gt=0, le=1, description="Share of the memory's bandwidth that kernels reach.")
    link_reach: float = Field(0.8, gt=0, le=1, description="Share of links and network that collectives reach.")
    kernel_seconds: float = Field(4e-6, ge=0, description="Time that the host needs to start a kernel.")
    context: float = Field(1.5e9, ge=0, description="Bytes that the driver and the collectives' library take.")
    lines: tuple[Line, ...] = Field((), description="Collectives within the node as measured, instead of the formulas.")
    source: str = Field("", description="Where the figures are from.")

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products at a precision of the spec. Raises SpecError for an unsupported precision."""
        rate = {"bf16": self.bf16, "fp16": self.bf16, "fp32": self.fp32, "fp8": self.fp8}[precision]
        if rate is None:
            problem = Problem("training.precision", precision, f"is not known to {self.name}", "use bf16")
            raise SpecError([problem])
        return rate


def _nvidia(name: str, source: str, **figures: float) -> Accelerator:
    return Accelerator.model_validate({"name": name, "source": source, **figures})


# Prices are round figures of the 2025 market, to be replaced. docs/planner.md has the sources of `reach`; for most
# accelerators it is a cautious guess.
_TABLE = (
    _nvidia(
        "A100-40GB",
        "NVIDIA A100 data sheet (2021), DGX A100 data sheet",
        bf16=312e12,
        fp32=19.5e12,
        memory=40 * GB,
        bandwidth=1.555e12,
        link=300 * GB,
        network=25 * GB,
        watts=400,
        price=1.5,
        reach=0.75,
    ),
    _nvidia(
        "A100",
        "NVIDIA A100 80GB SXM data sheet (2021), DGX A100 data sheet",
        bf16=312e12,
        fp32=19.5e12,
        memory=80 * GB,
        bandwidth=2.039e12,
        link=300 * GB,
        network=25 * GB,
        watts=400,
        price=1.8,
        reach=0.75,
    ),
    _nvidia(
        "H100",
        "NVIDIA H100 SXM data sheet (2023), DGX H100 data sheet",
        bf16=989.4e12,
        fp8=1978.9e12,
        fp32=66.9e12,
        memory=80 * GB,
        bandwidth=3.35e12,
        link=450 * GB,
        network=50 * GB,
        watts=700,
        price=3.0,
        reach=0.65,
    ),
    _nvidia(
        "H200",
        "NVIDIA H200 SXM data sheet (2024), DGX H200 data sheet",
        bf16=989.4e12,
        fp8=1978.9e12,
        fp32=66.9e12,
        memory=141 * GB,
        bandwidth=4.8e12,
        link=450 * GB,
        network=50 * GB,
        watts=700,
        price=3.5,
        reach=0.65,
    ),
    _nvidia(
        "B200",
        "DGX B200 data sheet (2024), an eighth of it",
        bf16=2250e12,
        fp8=4500e12,
        fp32=75e12,
        memory=180 * GB,
        bandwidth=8e12,
        link=900 * GB,
        network=50 * GB,
        watts=1000,
        price=5.0,
        reach=0.65,
    ),
    _nvidia(
        "GB200",
        "NVIDIA GB200 NVL72 data sheet (2024), a 72nd of it",
        bf16=2500e12,
        fp8=5000e12,
        fp32=80e12,
        memory=186 * GB,
        bandwidth=8e12,
        node=72,
        link=900 * GB,
        network=50 * GB,
        watts=1200,
        price=6.0,
        reach=0.65,
    ),
    _nvidia(
        "L40S",
        "NVIDIA L40S data sheet (2023); PCIe 4.0 x16",
        bf16=362e12,
        fp8=733e12,
        fp32=91.6e12,
        memory=48 * GB,
        bandwidth=864e9,
        link=32 * GB,
        network=12.5 * GB,
        watts=350,
        price=0.9,
        reach=0.6,
    ),
    Accelerator(
        name="MI300X",
        kind="amd",
        source="AMD Instinct MI300X data sheet (2023)",
        bf16=1307.4e12,
        fp8=2614.9e12,
        fp32=163.4e12,
        memory=192 * GB,
        bandwidth=5.3e12,
        link=448 * GB,
        network=50 * GB,
        watts=750,
        price=2.5,
        reach=0.5,
    ),
    Accelerator(
        name="MI325X",
        kind="amd",
        source="AMD Instinct MI325X data sheet (2024)",
        bf16=1307.4e12,
        fp8=2614.9e12,
        fp32=163.4e12,
        memory=256 * GB,
        bandwidth=6e12,
        link=448 * GB,
        network=50 * GB,
        watts=1000,
        price=3.0,
        reach=0.5,
    ),
    Accelerator(
        name="Gaudi2",
        kind="gaudi",
        source="Intel Gaudi 2 white paper: 21 and 3 ports of 100 Gb/s",
        bf16=432e12,
        fp8=865e12,
        fp32=11e12,
        memory=96 * GB,
        bandwidth=2.45e12,
        link=262.5 * GB,
        network=37.5 * GB,
        watts=600,
        price=1.3,
        reach=0.6,
    ),
    Accelerator(
        name="Gaudi3",
        kind="gaudi",
        source="Intel Gaudi 3 white paper: 21 and 3 ports of 200 Gb/s",
        bf16=1835e12,
        fp8=1835e12,
        fp32=28.7e12,
        memory=128 * GB,
        bandwidth=3.7e12,
        link=525 * GB,
        network=75 * GB,
        watts=900,
        price=2.0,
        reach=0.5,
    ),
)
ACCELERATORS = {each.name: each for each in _TABLE}
FILES = (".yaml", ".yml")
# Driver names of the boards whose peaks are in the table. Other boards of the same chip have other peaks.
_BOARDS = {
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA L40S": "L40S",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "GAUDI2": "Gaudi2",
    "GAUDI3": "Gaudi3",
}
_LABELS = {  # cloud.google.com/gke-accelerator
    "nvidia-tesla-a100": "A100-40GB",
    "nvidia-a100-80gb": "A100",
    "nvidia-h100-80gb": "H100",
    "nvidia-h100-mega-80gb": "H100",
    "nvidia-h200-141gb": "H200",
}


def accelerator(name: str, **figures: float) -> Accelerator:
    """The accelerator of that name, or that a YAML file describes (`name` ends in .yaml), with some `figures` replaced.

    A file may have `like: NAME` and only the differences. Raises SpecError for an unknown accelerator, and MissingError
    for an unreadable file.
    """
    fields: dict[str, object] = {}
    if name.endswith(FILES):
        fields = _read(Path(name))
        base = str(fields.pop("like", ""))
        fields.setdefault("name", Path(name).stem)
    else:
        base = name
    names = {known_name.lower(): known_name for known_name in ACCELERATORS}
    if base:
        if base.lower() not in names:
            raise SpecError(
                [
                    Problem(
                        "accelerator",
                        base,
                        "is not in the table, and is not guessed",
                        f"use {', '.join(ACCELERATORS)}, or a YAML file with its figures (docs/planner.md)",
                    )
                ]
            )
        fields = ACCELERATORS[names[base.lower()]].model_dump() | fields
    try:
        return Accelerator.model_validate(fields | figures)
    except ValidationError as error:
        raise SpecError(
            [
                Problem(".".join(map(str, detail["loc"])), detail["input"], detail["msg"], "see docs/planner.md")
                for detail in error.errors(include_url=False)
            ],
            name,
        ) from None


def by_device(name: str) -> Accelerator | None:
    """The accelerator in the table with the driver's name `name`; None without an exact match."""
    return ACCELERATORS[_BOARDS[name]] if name in _BOARDS else None


def by_label(value: str) -> Accelerator | None:
    """The accelerator that a node label names; None without an exact match.

    Names are those of drivers with hyphens for spaces, of Google's clusters, and of the table.
    """
    called = value.casefold().replace("-", " ")
    names = _BOARDS | _LABELS | {name: name for name in ACCELERATORS}
    accelerators = {name.casefold().replace("-", " "): ACCELERATORS[chip] for name, chip in names.items()}
    return accelerators.get(called)


def _read(path: Path) -> dict[str, object]:
    try:
        value = strict_yaml.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingError(f"{path}: cannot be read: {error.strerror}; name an accelerator or such a file") from None
    except strict_yaml.YamlRefusedError as error:
        raise SpecError([Problem("(file)", None, f"not valid YAML: {error}", "mend the syntax")], str(path)) from None
    if not isinstance(value, dict):
        raise SpecError([Problem("(file)", value, "is no mapping of figures", "see docs/planner.md")], str(path))
    return value
