"""Performance of accelerators, their nodes and the network between nodes, from the makers' data sheets.

An accelerator that is not in the table is refused, never guessed. A YAML file with the same fields describes another
one, or measured figures of this one. All rates are dense (no structured sparsity), per accelerator, in one direction.
"""

from collections.abc import Sequence
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

    name: str = Field(description="Its name.")
    kind: str = Field("nvidia", description="`cluster.accelerator` of the spec: nvidia, amd, gaudi, ascend or cpu.")
    bf16: float = Field(gt=0, description="FLOP/s of matrix products in bf16.")
    fp8: float | None = Field(None, gt=0, description="FLOP/s of matrix products in fp8, where it knows them.")
    fp32: float = Field(gt=0, description="FLOP/s in fp32.")
    memory: float = Field(gt=0, description="Bytes of memory.")
    bandwidth: float = Field(gt=0, description="Bytes a second of its memory.")
    node: int = Field(8, ge=1, le=1024, description="Accelerators that fast links join: a node, or a rack of them.")
    link: float = Field(gt=0, description="Bytes per second to the other devices of the node, in one direction.")
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


# bf16, fp8 and fp32 in TFLOP/s, memory in GB, bandwidth, link and network in GB/s; `-` is the default of the field.
# Prices are round figures of the 2025 market, to be replaced. docs/planner.md has the sources of `reach`; for most
# accelerators it is a cautious guess.
_TABLE = """
name       kind      bf16     fp8   fp32  memory  bandwidth  node   link  network  watts  price  reach
A100-40GB  nvidia     312       -   19.5      40       1555     -    300       25    400    1.5   0.75
A100       nvidia     312       -   19.5      80       2039     -    300       25    400    1.8   0.75
H100       nvidia   989.4  1978.9   66.9      80       3350     -    450       50    700      3   0.65
H200       nvidia   989.4  1978.9   66.9     141       4800     -    450       50    700    3.5   0.65
B200       nvidia    2250    4500     75     180       8000     -    900       50   1000      5   0.65
GB200      nvidia    2500    5000     80     186       8000    72    900       50   1200      6   0.65
L40S       nvidia     362     733   91.6      48        864     -     32     12.5    350    0.9    0.6
MI300X     amd     1307.4  2614.9  163.4     192       5300     -    448       50    750    2.5    0.5
MI325X     amd     1307.4  2614.9  163.4     256       6000     -    448       50   1000      3    0.5
Gaudi2     gaudi      432     865     11      96       2450     -  262.5     37.5    600    1.3    0.6
Gaudi3     gaudi     1835    1835   28.7     128       3700     -    525       75    900      2    0.5
"""
_UNITS = {
    **dict.fromkeys("bf16 fp8 fp32".split(), "e12"),
    **dict.fromkeys("memory bandwidth link network".split(), "e9"),
}
_SOURCES = {
    "A100-40GB": "NVIDIA A100 data sheet (2021), DGX A100 data sheet",
    "A100": "NVIDIA A100 80GB SXM data sheet (2021), DGX A100 data sheet",
    "H100": "NVIDIA H100 SXM data sheet (2023), DGX H100 data sheet",
    "H200": "NVIDIA H200 SXM data sheet (2024), DGX H200 data sheet",
    "B200": "DGX B200 data sheet (2024), an eighth of it",
    "GB200": "NVIDIA GB200 NVL72 data sheet (2024), a 72nd of it",
    "L40S": "NVIDIA L40S data sheet (2023); PCIe 4.0 x16",
    "MI300X": "AMD Instinct MI300X data sheet (2023)",
    "MI325X": "AMD Instinct MI325X data sheet (2024)",
    "Gaudi2": "Intel Gaudi 2 white paper: 21 and 3 ports of 100 Gb/s",
    "Gaudi3": "Intel Gaudi 3 white paper: 21 and 3 ports of 200 Gb/s",
}


def _from_table(fields: Sequence[str], cells: Sequence[str]) -> Accelerator:
    figures = {
        field: f"{cell}{_UNITS.get(field, '')}" for field, cell in zip(fields, cells, strict=True) if cell != "-"
    }
    return Accelerator.model_validate_strings({**figures, "source": _SOURCES[cells[0]]})


_FIELDS, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())
ACCELERATORS = {cells[0]: _from_table(_FIELDS, cells) for cells in _ROWS}
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
        raise SpecError([Problem("(file)", None, f"not valid YAML: {error}", "fix the syntax")], str(path)) from None
    if not isinstance(value, dict):
        raise SpecError([Problem("(file)", value, "is no mapping of figures", "see docs/planner.md")], str(path))
    return value
