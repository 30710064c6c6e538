"""The report of the benchmark, in Markdown."""

from __future__ import annotations

import json
from typing import Any

NOTES = {
    "exactness": "A run without interruption, and one that is killed (SIGKILL) after a step and resumed: bf16, exact, "
    "with a process group of one rank. Both must end with the same BLAKE3 digest of weights and moments.",
    "kernels": "One profiled step in bf16, exact, with and without document masks: torch's attention operations and "
    "the kernels on the device. `math` is torch's attention without a fused kernel.",
    "memory": "Peak of one step. `planned` is the plan without fragmentation, driver and collectives; compare it "
    "with `peak`, what torch allocated. `planned_whole` includes them; compare it with `device_in_use`.",
    "mfu": "`off` and `exact` are Holdfast's engine at these levels of `training.determinism`. `bare` is a plain torch "
    "loop: same decoder, micro-batches, bf16 autocast, gradient clipping and fused AdamW. `-compiled`: "
    "Holdfast compiles each layer with torch.compile. FLOPs of a token: 6 N + 12 L D T.",
    "recovery": "From SIGKILL of the process to the end of the first step of a new one, which starts Python, imports, "
    "and loads the checkpoint.",
    "stall": "A save of weights and moments to a store in a folder. `host_stall_s`: the training thread waits in "
    "Holdfast. `slower_s`: the save and the next steps, minus the time of these steps alone. The first save also "
    "allocates and pins its buffer. `torch_save_s` and the call of `dcp_async_save` stop training for all their time.",
    "locking": "A training loop while a thread touches or locks host memory. `lost_s`: its time beyond that of these "
    "steps alone. `lock_new`: CUDA finds the pages. Without CUDA: `touch` only.",
    "health": "The health check of a run (`holdfast health`) on this rank.",
}


def markdown(results: dict[str, Any]) -> str:
    """The report of all sections."""
    lines = ["# One accelerator", ""]
    for section, parts in results.items():
        lines += [f"## {section}", "", NOTES.get(section, ""), ""]
        if section == "mfu":
            lines += ["| variant | step, s | tokens/s | MFU | TFLOP/s | peak, GiB |", "|---|---|---|---|---|---|"]
            lines += [_mfu_row(name, part) for name, part in parts.items() if "step_s" in part] + [""]
        lines += ["```", json.dumps(parts, indent=1)[:20000], "```", ""]
    return "\n".join(lines)


def _mfu_row(name: str, part: dict[str, Any]) -> str:
    """A row of the report."""
    share = "-" if part["mfu"] is None else f"{100 * part['mfu']:.1f} %"
    return (
        f"| {name} | {part['step_s']:.3f} | {part['tokens_per_s']:.0f} | {share} | {part['tflops']:.0f} "
        f"| {part['peak_bytes'] / 2**30:.1f} |"
    )
