"""Plan of this gang: the environment of each rank, and a check that all ranks compute alike."""

import logging
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version

import torch

from holdfast.checkpoint import Attempt, claim_attempt, newest_segments
from holdfast.engines.assignment import Assignment
from holdfast.launch.device import device_name
from holdfast.runtime.environment import IMAGE_VARIABLE
from holdfast.spec.errors import PlanChangedError
from holdfast.spec.plan import MISSING, Plan, Value, free_under, require_plan, settings_of
from holdfast.store import Store

log = logging.getLogger("holdfast.train")

# Variables that are known to change which kernels run, how they split their work, or the order of sums.
CHANGES_BITS = re.compile(
    r"OMP_(NUM_THREADS|DYNAMIC|SCHEDULE)|KMP_DETERMINISTIC_REDUCTION|OPENBLAS_(NUM_THREADS|CORETYPE)"
    r"|MKL_(?!VERBOSE)\w+|(DNNL|ONEDNN)_(MAX_CPU_ISA|CPU_ISA_HINTS|DEFAULT_FPMATH_MODE)|ATEN_CPU_CAPABILITY"
    r"|CUBLAS_WORKSPACE_CONFIG|CUBLASLT_WORKSPACE_SIZE|NVIDIA_TF32_OVERRIDE|DISABLE_ADDMM_CUDA_LT"
    r"|TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|BLAS_PREFER_\w+|COMPILE_DISABLE)|TORCHDYNAMO_DISABLE"
    r"|TORCHINDUCTOR_(MAX_AUTOTUNE\w*|FREEZING|EMULATE_PRECISION_CASTS)|PYTORCH_TUNABLEOP_(ENABLED|TUNING)"
    r"|NCCL_(ALGO|PROTO|NTHREADS|(MIN|MAX)_(N?CHANNELS|CTAS)|NVLS_ENABLE|COLLNET_ENABLE|BUFFSIZE|NET|IB_DISABLE)|FI_PROVIDER"
    r"|ROCBLAS_\w+|HIPBLASLT_\w+|MIOPEN_FIND_\w+|HSA_OVERRIDE_GFX_VERSION|HCCL_(ALGO|DETERMINISTIC)"
)
PACKAGES_SHOWN = 5
ODD_RANKS_SHOWN = 8


def plan_of(assignment: Assignment, device: torch.device) -> Plan:
    """The plan as this rank determines it. Call it once torch is set up and the gang has formed, because it includes
    the number of ranks."""
    parallel = assignment.parallel
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // parallel.processes
    settings = settings_of(assignment.training, parallel, assignment.accelerator, nodes)
    free = free_under(assignment.training.determinism)
    return Plan(settings=settings, surroundings=surroundings_of(device, parallel.engine), free=free)


def require_recorded_plan(recorded: Plan, here: Plan) -> None:
    """Raises PlanChangedError if a replay on this machine would compute differently from the run."""
    if here.fingerprint != recorded.fingerprint:
        changes = "; ".join(recorded.differences(here, "in the run", "here"))
        raise PlanChangedError(
            f"this machine computes in another way than the one that the run was computed on: {changes}. Replay it on "
            "one like that, or say --anyway: what differs then proves nothing"
        )


def require_one_plan(plans: Sequence[Plan], determinism: str) -> None:
    """Refuse a gang whose ranks do not compute alike, because after a restart ranks may change places. `plans` are
    in rank order. Raises PlanChangedError with each odd rank and its differences. Under determinism `off` it only
    logs a warning."""
    odd_ranks = {
        rank: differences
        for rank, plan in enumerate(plans)
        if (differences := plans[0].differences(plan, "on rank 0", "here"))
    }
    if not odd_ranks:
        return
    differing = "; ".join(
        f"rank {rank}: {', '.join(differences)}" for rank, differences in list(odd_ranks.items())[:ODD_RANKS_SHOWN]
    )
    message = f"{len(odd_ranks)} of {len(plans)} ranks compute in another way than rank 0 ({differing})"
    if determinism != "off":
        raise PlanChangedError(
            f"{message}, and training.determinism: {determinism} promises bits. Make the nodes alike, for instance by "
            "cluster.node_selector, or set training.determinism: off"
        )
    log.warning("%s", message)


def require_equal_packages(packages: Sequence[Sequence[str]], determinism: str) -> None:
    """Refuse a gang whose ranks have different packages. `packages` are `name==version` of each rank, in rank order.
    Raises PlanChangedError with the differences. Under determinism `off` it only logs a warning."""
    first = set(packages[0])
    odd_ranks = {rank: first ^ set(ones) for rank, ones in enumerate(packages) if set(ones) != first}
    rank, differing = next(iter(odd_ranks.items()))
    here, there = (sorted(differing & set(ones))[:PACKAGES_SHOWN] for ones in (packages[0], packages[rank]))
    message = (
        f"{len(odd_ranks)} of {len(packages)} ranks have other packages than rank 0. Rank {rank} has "
        f"{', '.join(there) or 'none'}, and rank 0 has {', '.join(here) or 'none'} instead"
    )
    if determinism != "off":
        raise PlanChangedError(f"{message}. Install the same packages on all nodes, or use one image for them")
    log.warning("%s", message)


def claim(
    store: Store, run_id: str, launch: int, world_size: int, plan: Plan, determinism: str, replan: bool
) -> Attempt:
    """Claim an attempt for a gang. Raises PlanChangedError, without a claim, if the run may not continue under the
    gang's plan. Earlier attempts are then not fenced off."""
    if changes := require_plan(newest_segments(store, run_id), plan, determinism, replan):
        log.warning("the plan changes, and with it the last bits of what follows: %s", "; ".join(changes))
    return claim_attempt(
        store,
        run_id,
        launch=launch,
        world_size=world_size,
        plan=plan.model_dump(mode="json"),
        fingerprint=plan.fingerprint,
    )


def surroundings_of(device: torch.device, engine: str) -> dict[str, Value]:
    """What this rank computes with: device, image, versions, and variables that change bits."""
    surroundings: dict[str, Value] = {
        "device": device_name(device),
        "image": os.environ.get(IMAGE_VARIABLE) or MISSING,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
    }
    if engine == "deepspeed":
        surroundings["version of DeepSpeed"] = version("deepspeed")
    if device.type == "cuda":
        surroundings["version of CUDA"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        surroundings["version of cuDNN"] = torch.backends.cudnn.version()
        surroundings["version of NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    variables = sorted(name for name in os.environ if CHANGES_BITS.fullmatch(name))
    return surroundings | {f"variable {name}": os.environ[name] for name in variables}
