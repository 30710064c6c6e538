"""Published tables that the planner is measured by. The figures are those of the papers."""

from dataclasses import dataclass

from holdfast.planning import Architecture, Layout


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    """A GPT as Megatron-LM's papers train it: sequences of 2,048 tokens, 51,200 words."""
    return Architecture(
        layers, hidden, heads, heads, 4 * hidden, 2048, 51200, tied=True, gated=False, biased=True, dropout=True
    )


@dataclass(frozen=True)
class Megatron:
    """A row of table 1 of Narayanan 2021 (SC'21, arXiv 2104.04473): A100s of 80 GB, with full recomputation."""

    billions: float
    shape: Architecture
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    teraflops: float  # of a GPU, with recomputation


MEGATRON = (
    Megatron(1.7, gpt(24, 2304, 24), 1, 1, 32, 512, 137),
    Megatron(3.6, gpt(30, 3072, 32), 2, 1, 64, 512, 138),
    Megatron(7.5, gpt(36, 4096, 32), 4, 1, 128, 512, 142),
    Megatron(18.4, gpt(40, 6144, 48), 8, 1, 256, 1024, 135),
    Megatron(39.1, gpt(48, 8192, 64), 8, 2, 512, 1536, 138),
    Megatron(76.1, gpt(60, 10240, 80), 8, 4, 1024, 1792, 140),
    Megatron(145.6, gpt(80, 12288, 96), 8, 8, 1536, 2304, 148),
    Megatron(310.1, gpt(96, 16384, 128), 8, 16, 1920, 2160, 155),
    Megatron(529.6, gpt(105, 20480, 128), 8, 35, 2520, 2520, 163),
    Megatron(1008.0, gpt(128, 25600, 160), 8, 64, 3072, 3072, 163),
)


@dataclass(frozen=True)
class Korthikanti:
    """A row of tables 3 and 5 of Korthikanti 2022 (arXiv 2205.05198): A100s of 80 GB."""

    name: str
    shape: Architecture
    layout: Layout
    batch: int
    full: float  # seconds of a step with full recomputation
    selective: float  # and of one that recomputes attention alone


KORTHIKANTI = (
    Korthikanti("22B", gpt(48, 6144, 64), Layout(tensor=8, micro_batch=4), 4, 1.42, 1.10),
    Korthikanti(
        "175B", gpt(96, 12288, 96), Layout(tensor=8, pipeline=8, schedule="interleaved", chunks=3), 64, 18.13, 13.75
    ),
    Korthikanti(
        "530B", gpt(105, 20480, 128), Layout(tensor=8, pipeline=35, schedule="interleaved", chunks=3), 280, 49.05, 37.83
    ),
    Korthikanti("1T", gpt(128, 25600, 160), Layout(tensor=8, pipeline=64), 512, 94.42, 71.49),
)


@dataclass(frozen=True)
class Llama:
    """A row of table 4 of the Llama 3 paper (arXiv 2407.21783): 405 B on H100s of 80 GB."""

    sequence: int
    layout: Layout
    batch: int  # sequences in a step
    teraflops: float  # of a GPU

    @property
    def shape(self) -> Architecture:
        return Architecture(126, 16384, 128, 8, 53248, self.sequence, 128_256)


def _llama(data: int, context: int) -> Layout:
    return Layout(
        data=data, shard=data, sharding="optimizer", tensor=8, pipeline=16, context=context, schedule="interleaved",
        chunks=4,
    )  # fmt: skip


LLAMA = (
    Llama(8192, _llama(64, 1), 64 * 32, 430),
    Llama(8192, _llama(128, 1), 128 * 16, 400),
    Llama(131_072, _llama(8, 16), 8 * 16, 380),
)
