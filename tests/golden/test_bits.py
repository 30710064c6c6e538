"""The final bits of runs do not change between commits unless DATA_PLANE_VERSION changes.

Other tests compare two runs of the same code. This one compares with `bits.json`, for the versions of torch and the
kernels in that file. After a deliberate change of bits, raise DATA_PLANE_VERSION, then run HOLDFAST_UPDATE_GOLDEN=1
.venv/bin/pytest tests/golden
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.spec import DATA_PLANE_VERSION

GOLDEN = Path(__file__).with_name("bits.json")
CAPABILITY = "AVX2"
# The newest kernels that every x86 machine of the last ten years supports, in each library that selects kernels
# itself. Only in this mode does MKL promise the same bits on all Intel CPUs at any memory alignment. Under
# COMPATIBLE, the weights that DeepSpeed keeps in one flat tensor had other bits on another Xeon.
KERNELS = {"ATEN_CPU_CAPABILITY": CAPABILITY.lower(), "ONEDNN_MAX_CPU_ISA": CAPABILITY, "MKL_CBWR": "AVX2,STRICT"}
CPUS = Path("/proc/cpuinfo")
MAKER = re.search(r"^vendor_id\s*:\s*(\S+)$", CPUS.read_text(), re.M) if CPUS.exists() else None
KEY = f"torch {torch.__version__.partition('+')[0]}, {MAKER[1] if MAKER else platform.machine()}, {CAPABILITY}"

Golden = dict[str, dict[str, object]]


def complaint(golden: Golden, key: str, version: int, found: dict[str, str]) -> str:
    """The problems of the given digests, in words. Empty if there are none."""
    recorded = golden[key]
    if recorded["data_plane_version"] != version:
        return (
            f"bits.json was written at DATA_PLANE_VERSION {recorded['data_plane_version']}, which is {version} now; "
            "HOLDFAST_UPDATE_GOLDEN=1 .venv/bin/pytest tests/golden writes it anew"
        )
    expected = recorded["digests"]
    assert isinstance(expected, dict)
    changed = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not changed:
        return ""
    return (
        f"the same run now ends with other bits: {'; '.join(changed)}. Runs that were begun before this change would "
        "neither resume nor be found equal. If that is not meant, fix it; if it is, raise DATA_PLANE_VERSION in "
        "holdfast/spec/identity.py, which gives every run another id, and write bits.json anew with "
        "HOLDFAST_UPDATE_GOLDEN=1"
    )


def test_the_same_runs_end_with_the_bits_of_the_commits_before(tmp_path: Path) -> None:
    golden: Golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    update = bool(os.environ.get("HOLDFAST_UPDATE_GOLDEN"))
    if KEY not in golden and not update:
        pytest.skip(f"bits.json has digests for {'; '.join(golden)}; here is {KEY}")
    process = subprocess.run(
        [sys.executable, "-m", "tests.golden.train", str(tmp_path)],
        env={**os.environ, **KERNELS}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    digests = json.loads(process.stdout.splitlines()[-1])
    if (capability := digests.pop("capability")) != CAPABILITY:
        pytest.skip(f"this processor has {capability} where the digests were made with {CAPABILITY}")
    wrong = complaint(golden, KEY, DATA_PLANE_VERSION, digests) if KEY in golden else ""
    if update and "other bits" not in wrong:
        golden[KEY] = {"data_plane_version": DATA_PLANE_VERSION, "digests": digests}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    else:
        assert not wrong, wrong


def test_a_changed_digest_under_the_same_version_is_explained() -> None:
    golden: Golden = {"here": {"data_plane_version": 1, "digests": {"ddp": "a", "fsdp": "b"}}}
    assert complaint(golden, "here", 1, {"ddp": "a", "fsdp": "b"}) == ""
    message = complaint(golden, "here", 1, {"ddp": "a", "fsdp": "c"})
    assert message.startswith("the same run now ends with other bits: fsdp. ")
    assert "raise DATA_PLANE_VERSION" in message
    assert "written at DATA_PLANE_VERSION 1, which is 2 now" in complaint(golden, "here", 2, {"ddp": "a", "fsdp": "c"})
