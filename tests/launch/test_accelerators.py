"""The table of accelerators, and how a rank uses it on this machine."""

import subprocess
import sys
from typing import get_args

import pytest
import torch

from holdfast.launch import accelerators
from holdfast.launch.accelerators import ACCELERATORS, backend_of, slice_resource, training_image
from holdfast.launch.device import local_device
from holdfast.rank.plan import CHANGES_BITS
from holdfast.spec import parse_spec
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MissingError
from holdfast.spec.rules.cluster import NETWORKS

SPEC = "{name: a, data: {sources: [{uri: x}]}, cluster: {accelerator: %s}}"


def test_every_kind_that_a_spec_may_name_is_in_the_table() -> None:
    assert set(ACCELERATORS) == set(get_args(Cluster.model_fields["accelerator"].annotation))
    for kind, accelerator in ACCELERATORS.items():
        assert (accelerator.resource is None) == (accelerator.gres is None) == (kind == "cpu")
        assert training_image(kind).startswith(f"holdfast-train-{kind}:")


def test_the_rules_allow_slices_where_the_table_knows_them() -> None:
    from holdfast.spec import SpecError

    for kind, accelerator in ACCELERATORS.items():
        if kind == "tpu":  # a TPU is refused
            continue
        text = SPEC % f"{kind}, slice: 1g.10gb"
        if accelerator.slices is None:
            with pytest.raises(SpecError, match=r"cluster\.slice"):
                parse_spec(text)
        else:
            parse_spec(text)


def test_a_slice_has_the_name_of_its_device_plugin() -> None:
    assert slice_resource("nvidia", "1g.10gb") == "nvidia.com/mig-1g.10gb"
    assert slice_resource("nvidia", "1g.10gb.shared") == "nvidia.com/mig-1g.10gb.shared"
    assert slice_resource("nvidia", "shared") == "nvidia.com/gpu.shared"  # shared by time, or by MPS
    assert slice_resource("amd", "cpx_nps4") == "amd.com/cpx_nps4"


def test_the_rules_know_the_networks_of_the_table() -> None:
    assert {kind: tuple(networks) for kind, networks in accelerators.NETWORKS.items()} == NETWORKS
    assert set(accelerators.POD_INTERFACE) == set(NETWORKS) == set(ACCELERATORS) - {"tpu"}
    names = set(get_args(get_args(Cluster.model_fields["network"].annotation)[0]))
    assert names == {name for network in NETWORKS.values() for name in network}


def test_variables_that_select_the_network_are_in_the_plan() -> None:
    """Another network may use another algorithm, and so another order of sums."""
    deciding = {"NCCL_NET", "FI_PROVIDER"}
    for network in accelerators.NETWORKS.values():
        for variables in network.values():
            assert all(CHANGES_BITS.fullmatch(name) for name in deciding & set(variables))


def test_training_on_a_tpu_is_refused_with_a_message() -> None:
    from holdfast.spec import SpecError

    with pytest.raises(SpecError, match=r"(?s)cluster\.accelerator.*XLA.*nvidia"):
        parse_spec(SPEC % "tpu")


def test_tensors_on_the_cpu_always_use_gloo() -> None:
    assert {device: backend_of(device) for device in ("cpu", "cuda", "npu", "hpu")} == {
        "cpu": "gloo",
        "cuda": "cpu:gloo,cuda:nccl",
        "npu": "cpu:gloo,npu:hccl",
        "hpu": "cpu:gloo,hpu:hccl",
    }


def test_the_cpu_is_always_there() -> None:
    assert local_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nvidia", "needs 1 devices, this machine has 0"),
        ("amd", "needs 1 devices, this machine has 0"),
        ("ascend", "needs the module torch_npu"),
        ("gaudi", "needs the module habana_frameworks.torch.core"),
    ],
)
def test_a_missing_accelerator_is_reported_with_the_remedy(kind: str, says: str) -> None:
    with pytest.raises(MissingError, match=says) as error:
        local_device(kind)
    assert "--set cluster.accelerator=cpu" in str(error.value)


def test_emitting_needs_no_torch() -> None:
    code = "import sys, holdfast.launch.emitters; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
