"""Adapters in the layout of `peft`: adapter_model.safetensors and adapter_config.json, generated in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from holdfast.model.export import ExportFile, document_file, tensor_file
from holdfast.spec.training import Lora

FOLDER = "adapter"  # within an export: `transformers` would treat a model next to adapter_config.json as its base
PREFIX = "base_model.model."  # before a tensor's name in `transformers`
HUB = "hf://"


def peft_files(
    shapes: Mapping[str, tuple[int, ...]], rows: Callable[[str], Iterator[Tensor]], lora: Lora, base: str
) -> list[ExportFile]:
    """The files of adapters with these shapes for the weights at `base` (see `model.init_from`). Their names begin
    with FOLDER."""

    def named(name: str) -> Iterator[Tensor]:
        return rows(name.removeprefix(PREFIX))

    name, _, revision = base.removeprefix(HUB).partition("@") if base.startswith(HUB) else (base, "", "")
    config = {
        "base_model_name_or_path": name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "revision": revision or None,
        "target_modules": sorted(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
    return [
        document_file(f"{FOLDER}/adapter_config.json", config),
        tensor_file(
            f"{FOLDER}/adapter_model.safetensors", {PREFIX + each: shapes[each] for each in sorted(shapes)}, named
        ),
    ]
