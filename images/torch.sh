#!/bin/sh
# Installs torch: `torch.sh WANTED PYTHON -m pip install OPTIONS...`. PyPI's torch brings CUDA, 5 GB that a machine without
# an NVIDIA driver cannot use; PyTorch publishes a wheel for CPUs in its own index. WANTED is one of
#   any   TORCH if it is set; without an NVIDIA driver the CPU wheel; else, or if that fails, what pip's own index has
#   cpu   TORCH if it is set, else the CPU wheel; a torch that needs CUDA is refused before anything is installed
# From the environment: TORCH, a requirement for pip, and TORCH_CPU_INDEX, a mirror of PyTorch's index.
set -eu
wanted=$1
shift
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

has_driver() { [ -e /proc/driver/nvidia/version ] || [ -e /dev/dxg ] || command -v nvidia-smi >/dev/null; }

# Prints the version that pip would install, if it needs CUDA. Reads metadata, not the wheel.
cuda_version() {
    "$@" --dry-run --no-deps --ignore-installed --report - | "$1" -c '
import json, sys
(found,) = json.load(sys.stdin)["install"]
needs = found["metadata"].get("requires_dist", [])
print(found["metadata"]["version"] if any(need.startswith(("nvidia-", "cuda-")) for need in needs) else "")'
}

if [ -z "${TORCH:-}" ]; then
    if [ "$wanted" = any ] && has_driver; then exec "$@" torch; fi
    # Only torch comes from this index. What torch needs comes from pip's own, with everything else.
    output=$("$@" --no-deps --index-url "$index" --timeout 5 --retries 1 torch 2>&1) && exit
    printf '%s\n' "$output" "PyTorch's CPU wheel cannot be installed from $index; trying pip's own index." >&2
fi
version=$(cuda_version "$@" "${TORCH:-torch}")
if [ "$wanted" = cpu ] && [ -n "$version" ]; then
    echo "torch $version needs CUDA, gigabytes that this image does not use, and is not installed. Name a CPU wheel in" \
        "TORCH (torch==<version>+cpu) and an index that has it in PIP_CONFIG_FILE, or a mirror in TORCH_CPU_INDEX." >&2
    exit 1
fi
[ -z "$version" ] || echo "Installing torch $version with CUDA: 3 GB to download. TORCH= selects another build." >&2
exec "$@" "${TORCH:-torch}"
