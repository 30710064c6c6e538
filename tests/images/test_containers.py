"""The images, built from the lock file and run as on a cluster: without root, on a read-only root file system, without
capabilities. A build takes minutes and needs a builder, so it is opt-in:

HOLDFAST_BUILD_IMAGES=1 pytest tests/images

BASE, PIP_CONFIG_FILE and BUILD_OPTIONS of images/build.sh are passed on. HOLDFAST_RUN_OPTIONS goes to podman run.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.whole.small import write_corpus, write_spec

ROOT = Path(__file__).parents[2]
LIGHT = f"localhost/holdfast:{version('holdfast')}"
TORCHRUN = ["python", "-m", "holdfast.launch.torchrun"]
TRAIN = f"localhost/holdfast-train-cpu:{version('holdfast')}"

pytestmark = [
    pytest.mark.skipif("HOLDFAST_BUILD_IMAGES" not in os.environ, reason="set HOLDFAST_BUILD_IMAGES=1 to build images"),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed, so no container can be run"),
    pytest.mark.timeout(3600),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def images() -> None:
    """Both images that run without an accelerator."""
    builder = "buildah" if shutil.which("buildah") else "podman"
    process = subprocess.run(
        [ROOT / "images/build.sh", "light", "train-cpu"],
        check=False, env={"BUILDER": builder, **os.environ}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with a corpus and a spec, and a store that the containers' user can write."""
    write_corpus(tmp_path / "input")
    write_spec(tmp_path / "input")
    (tmp_path / "store").mkdir()
    for folder in (tmp_path, *tmp_path.rglob("*")):
        folder.chmod(0o755)
    (tmp_path / "store").chmod(0o777)
    return tmp_path


def container(shared: Path, image: str, *command: str, **environment: str) -> list[str]:
    """The command that runs one container like a pod of ours."""
    options = ["--rm", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
    options += ["--tmpfs", "/tmp:rw,exec,mode=1777", "--volume", f"{shared}/input:/input:ro"]
    options += ["--volume", f"{shared}/store:/store", "--workdir", "/input", "--network", "host"]
    options += [option for name, value in environment.items() for option in ("--env", f"{name}={value}")]
    return ["podman", *shlex.split(os.environ.get("HOLDFAST_PODMAN_OPTIONS", "")), "run", *options,
            *shlex.split(os.environ.get("HOLDFAST_RUN_OPTIONS", "")), image, *command]  # fmt: skip


def run(shared: Path, image: str, *command: str, **environment: str) -> str:
    """The output of a container. It must succeed."""
    process = subprocess.run(
        container(shared, image, *command, **environment), check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def last_json(printed: str) -> dict[str, Any]:
    """The result that a step prints last."""
    return dict(json.loads(printed.strip().splitlines()[-1]))


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(("image", "kind"), [(LIGHT, "light"), (TRAIN, "train-cpu")])
def test_an_image_knows_what_it_is_and_carries_nothing_of_its_builder(shared: Path, image: str, kind: str) -> None:
    report = json.loads(run(shared, image, "holdfast-selfcheck"))
    assert report["problems"] == []
    assert report["image"] == kind
    assert report["uid"] > 0
    config = json.loads(subprocess.check_output(["podman", "image", "inspect", image]))[0]
    assert config["Labels"]["org.opencontainers.image.version"] == version("holdfast")
    assert config["Labels"]["org.opencontainers.image.revision"] == (report["commit"] or "")
    if settings := os.environ.get("PIP_CONFIG_FILE"):
        lines = {line.partition("=")[2].strip() for line in Path(settings).read_text().splitlines() if "=" in line}
        config_text = json.dumps(config)
        assert not [value for value in lines if len(value) > 8 and value in config_text]
    leftovers = run(
        shared, image, "sh", "-c", "ls /build ~root/.cache /var/lib/apt/lists/* /etc/pip.conf 2>/dev/null || :"
    )
    assert leftovers.strip() == ""


@pytest.mark.usefixtures("images")
def test_the_steps_run_and_two_processes_train_the_same_bits_in_one_pod_and_in_two(shared: Path) -> None:
    prepared = last_json(run(shared, LIGHT, "python", "-m", "holdfast.components.preprocess", "--spec", "spec.yaml",
                             "--store", "file:///store"))  # fmt: skip
    assert prepared["tokens"]["train"] > 1000
    train = ["python", "-m", "holdfast.components.train", "--spec", "spec.yaml", "--store", "file:///store",
             "--dataset-id", prepared["dataset_id"],
             "--set", "parallel.processes=2", "--set", "training.micro_batch=2"]  # fmt: skip
    alone = last_json(run(shared, LIGHT, *train, "--salt", "alone"))
    assert alone["step"] == 10

    claim_output = run(shared, LIGHT, "python", "-c", CLAIM, prepared["dataset_id"])
    run_id = claim_output.strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    worker = [
        "-m",
        "holdfast.rank.worker",
        "--run-id",
        run_id,
        "--launch",
        "1",
        "--store",
        "file:///store",
    ]
    rendezvous = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    ranks = []
    for node in range(2):
        command = container(
            shared, TRAIN, *TORCHRUN, *worker, **rendezvous, PET_NODE_RANK=str(node), GLOO_SOCKET_IFNAME="lo"
        )
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    apart = last_json(run(shared, LIGHT, *train, "--salt", "apart"))
    assert apart["run_id"] == run_id
    assert apart["state_digest"] == alone["state_digest"]


@pytest.mark.usefixtures("images")
def test_deepspeed_trains_in_the_training_image(shared: Path) -> None:
    prepared = last_json(run(shared, LIGHT, "python", "-m", "holdfast.components.preprocess", "--spec", "spec.yaml",
                             "--store", "file:///store"))  # fmt: skip
    run_id = run(shared, LIGHT, "python", "-c", CLAIM, prepared["dataset_id"], "parallel.strategy=zero1").strip()
    worker = [
        "-m",
        "holdfast.rank.worker",
        "--run-id",
        run_id,
        "--launch",
        "1",
        "--store",
        "file:///store",
    ]
    printed = run(shared, TRAIN, *TORCHRUN, "--nproc-per-node", "2", *worker)
    assert list(shared.glob("store/runs/*/checkpoints/step-*10.json")), printed


# The launcher does this before it starts the ranks.
CLAIM = """
import sys
from pathlib import Path
from holdfast.launch.launches import claim_launch
from holdfast.spec import load_spec, run_id
from holdfast.store import open_store
from holdfast.engines.assignment import Assignment
dataset, *more = sys.argv[1:]
spec = load_spec(Path("spec.yaml"), ["parallel.processes=2", "training.micro_batch=2", *more])
identity = run_id(spec, dataset, "apart" + "".join(more))
claim_launch(open_store("file:///store"), identity, Assignment.of(spec, identity, dataset).model_dump(mode="json"))
print(identity)
"""
