"""A run under another plan is refused by name. If a person requests it, it becomes a segment of the same run."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import list_attempts, read_manifest
from holdfast.components.train import run
from holdfast.components.train.result import read_result
from holdfast.launch.device import device_name
from holdfast.launch.launches import newest_launch, read_exits
from holdfast.rank.plan import plan_of as plan_here
from holdfast.rank.plan import require_equal_packages, require_one_plan
from holdfast.runtime.environment import IMAGE_VARIABLE
from holdfast.spec import ExitCode
from holdfast.spec.errors import PlanChangedError
from holdfast.spec.plan import changes_in_words
from tests.spec.plans import plan_of
from tests.train.ranks import Runs, identity_of, train_in_ranks
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_assignment, tiny_spec

CHANGING = (
    "OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_SCHEDULE", "KMP_DETERMINISTIC_REDUCTION", "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE", "MKL_CBWR", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE",
    "DISABLE_ADDMM_CUDA_LT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "TORCHINDUCTOR_FREEZING", "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE", "NCCL_BUFFSIZE", "NCCL_NET", "NCCL_IB_DISABLE", "FI_PROVIDER", "ROCBLAS_LAYER",
    "HIPBLASLT_TUNING_FILE", "MIOPEN_FIND_MODE", "HSA_OVERRIDE_GFX_VERSION", "HCCL_ALGO",
    "HCCL_DETERMINISTIC",
)  # fmt: skip


def test_the_plan_follows_each_variable_that_changes_bits_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CHANGING, IMAGE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assignment, device = tiny_assignment(), torch.device("cpu")
    base = plan_here(assignment, device)
    expected = {"device", "image", "CPU capability", "version of Python", "version of torch"}
    assert {name for name in base.surroundings if not name.startswith("variable ")} == expected
    for name in (*CHANGING, IMAGE_VARIABLE, "MKL_VERBOSE", "NCCL_DEBUG", "HOLDFAST_HOME"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "other")
            changed = plan_here(assignment, device).fingerprint != base.fingerprint
        assert changed is (name in CHANGING or name == IMAGE_VARIABLE), name


@pytest.mark.parametrize(("determinism", "same"), [("off", False), ("exact", False), ("elastic", True)])
@pytest.mark.parametrize(("processes", "ranks"), [(2, 2), (1, 2)])  # on one node, and on two
def test_another_number_of_ranks_is_another_plan_but_for_an_elastic_run(
    determinism: str, same: bool, processes: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = f"training.determinism={determinism}"
    monkeypatch.setenv("WORLD_SIZE", "1")
    first = plan_here(tiny_assignment(level), torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    second = plan_here(tiny_assignment(level, f"parallel.processes={processes}"), torch.device("cpu"))
    assert (first.fingerprint == second.fingerprint) is same
    assert bool(first.differences(second)) is not same


@pytest.mark.slow
def test_an_exact_run_refuses_a_changed_environment_and_accepts_it_with_replan(tmp_path: Path) -> None:
    store, spec = new_store(tmp_path / "store"), tiny_spec("training.steps=4", "cluster.restarts.budget=2")
    identity = identity_of(spec)
    runs: Runs = [(("training.steps=4",), "", 1)]
    assert train_in_ranks(1, store.url, tmp_path / "ranks", runs) == ["PreemptedError"]
    environment = {"ATEN_CPU_CAPABILITY": "default"}
    process = start_training(spec, store.url, tmp_path / "home", environment=environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == ExitCode.PLAN_CHANGED, output
    assert "variable ATEN_CPU_CAPABILITY: not set before, default now" in output
    assert "CPU capability: " in output
    assert [ending.code for ending in read_exits(store, identity).values()] == [ExitCode.PLAN_CHANGED]
    assert [number for number, _ in list_attempts(store, identity)] == [1]  # no attempt was fenced
    allowed = start_training(spec, store.url, tmp_path / "home", environment=environment, replan=True)
    output, _ = allowed.communicate(timeout=300)
    assert allowed.returncode == 0, output
    result = read_result(store, identity)
    assert result is not None
    assert [segment.from_step for segment in result.segments] == [0, 2]
    assert json.loads(output.splitlines()[-1])["segments"] == [
        segment.model_dump(mode="json") for segment in result.segments
    ]


def test_another_micro_batch_is_the_same_run_and_refused_before_a_gang_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store, small = new_store(tmp_path / "store"), tiny_spec("training.micro_batch=4")
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [((), "", 2)]) == ["PreemptedError"]
    assert identity_of(small) == identity_of(tiny_spec())
    launches = newest_launch(store, identity_of(small))
    with pytest.raises(PlanChangedError, match=r"training.micro_batch: 2 before, 4 now.*--replan"):
        run(small, DATASET_ID, store)
    assert newest_launch(store, identity_of(small)) == launches
    free = tiny_spec("training.determinism=off")
    assert train_in_ranks(1, store.url, tmp_path / "off", [(("training.determinism=off",), "", 2)]) == [
        "PreemptedError"
    ]
    other = ("training.determinism=off", "training.micro_batch=4")
    assert train_in_ranks(1, store.url, tmp_path / "free", [(other, "", None)]) == [""]  # recorded, not refused
    segments = read_manifest(store, identity_of(free), free.training.steps).segments
    assert changes_in_words(segments) == [[], ["training.micro_batch: 2 before, 4 now"]]


@pytest.mark.slow
def test_a_run_that_is_finished_is_finished_at_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    store = new_store(tmp_path / "store")
    first = run(tiny_spec("training.steps=3"), DATASET_ID, store)
    repeated = run(tiny_spec("training.steps=3", "parallel.strategy=fsdp", "parallel.processes=2"), DATASET_ID, store)
    assert repeated == first
    assert newest_launch(store, first.run_id) == 1


def test_ranks_with_different_plans_are_refused_by_name() -> None:
    alike, odd = plan_of(device="H100"), plan_of(device="A100")
    require_one_plan([alike, alike], "exact")
    words = r"1 of 3 ranks .* \(rank 2: device: H100 on rank 0, A100 here\).*cluster.node_selector"
    with pytest.raises(PlanChangedError, match=words):
        require_one_plan([alike, alike, odd], "exact")
    require_one_plan([alike, alike, odd], "off")


def test_ranks_with_different_packages_are_refused_with_their_versions() -> None:
    require_equal = partial(require_equal_packages, [["a==1", "b==2"], ["a==1", "b==2"], ["a==1", "b==3", "c==1"]])
    words = r"1 of 3 ranks have other packages.* Rank 2 has b==3, c==1, and rank 0 has b==2 instead\. Install the same"
    with pytest.raises(PlanChangedError, match=words):
        require_equal("exact")
    require_equal("off")


def test_the_device_name_comes_from_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"board {device.index}")
    assert device_name(torch.device("cuda", 3)) == "board 3"


def test_a_cpu_with_a_generic_name_is_identified_by_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = "cpu family\t: 6\nmodel\t\t: {}\nmodel name\t: Intel(R) Xeon(R) Processor\ncpu family\t: 6\n"
    names = []
    for model in (143, 207):
        monkeypatch.setattr(Path, "read_text", lambda _, model=model: cpuinfo.format(model))
        names.append(device_name(torch.device("cpu")))
    assert names == [f"Intel(R) Xeon(R) Processor (family 6, model {model})" for model in (143, 207)]
