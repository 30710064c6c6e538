"""Requirements for every image, checked in the Dockerfiles."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, with joined continuation lines."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def final_stage(path: Path) -> list[Instruction]:
    """The instructions after the last FROM."""
    steps = instructions(path)
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    return steps[last:]


EXTENSION = "extend.Dockerfile"  # adds packages to an image of ours, from which it has labels and settings


@pytest.fixture(params=sorted(path.name for path in IMAGES.glob("*.Dockerfile") if path.name != EXTENSION))
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return IMAGES / request.param


def test_an_image_runs_as_a_numeric_non_root_user(dockerfile: Path) -> None:
    *_, user = (rest for word, rest in final_stage(dockerfile) if word == "USER")
    uid, gid = user.split(":")
    assert int(uid) > 0
    assert int(gid) > 0


def test_its_base_is_an_argument_with_a_version(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    (default,) = (rest for word, rest in steps if word == "ARG" and rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=[a-z]+:\d+\.\d+[a-z0-9.-]*", default)
    stages = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert len(stages) > 1  # the build stage is not part of the image
    assert set(stages) == {"${BASE}", "dependencies"}
    assert stages[-1] == "${BASE}"


def test_an_image_build_downloads_only_packages(dockerfile: Path) -> None:
    for word, rest in instructions(dockerfile):
        assert word != "ADD"
        assert not re.search(r"https?://|\bcurl\b|\bwget\b|\bgit clone\b", rest), rest


def test_settings_of_the_package_manager_are_a_secret_of_one_command(dockerfile: Path) -> None:
    steps = instructions(dockerfile)
    mounts = [rest for word, rest in steps if word == "RUN" and "--mount" in rest]
    assert mounts
    assert all(rest.startswith("--mount=type=secret,id=pip.conf,target=/etc/pip.conf ") for rest in mounts)
    for word, rest in steps:
        if word in ("ARG", "ENV"):
            assert not re.search(r"PASSWORD|SECRET|TOKEN|INDEX_URL|ACCESS_KEY|PROXY", rest.upper()), rest


def test_an_image_has_its_labels_and_runs_its_self_check(dockerfile: Path) -> None:
    stage = final_stage(dockerfile)
    labels = " ".join(rest for word, rest in stage if word == "LABEL")
    for name in ("title", "version", "revision", "source", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels
    words = [f"{word} {rest}" for word, rest in stage]
    assert words.index("RUN holdfast-selfcheck") > next(i for i, text in enumerate(words) if text.startswith("USER 1"))
    assert any('HOLDFAST_GIT_COMMIT="${REVISION}"' in text for text in words)


def test_each_image_has_what_its_steps_import() -> None:
    for file, pattern, needs in (
        ("light.Dockerfile", r"\.sh dependencies (\S+)",
            {"preprocess", "dvc", "train", "tracking", "pipelines", "tasks", "metrics", "otel"}),
        # evaluate runs in this image on a `cluster.slice`
        ("train.Dockerfile", r"ARG EXTRAS=(\S+)",
            {"train", "deepspeed", "tracking", "pipelines", "tasks", "metrics", "nvml", "otel"}),
        # a Ray node runs every step in one image
        ("build.sh", r"EXTRAS=([^\s)]+)",
            {"preprocess", "dvc", "train", "deepspeed", "tracking", "pipelines", "tasks", "metrics", "nvml", "otel",
             "ray"}),
    ):  # fmt: skip
        (extras,) = re.findall(pattern, (IMAGES / file).read_text())
        assert set(extras.split(",")) == needs


def test_the_image_of_a_ray_is_built_as_such(tmp_path: Path) -> None:
    builder = tmp_path / "buildah"
    builder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    builder.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/", "BUILDER": "buildah"}
    process = subprocess.run(
        [IMAGES / "build.sh", "ray-cpu"], check=True, env=environment, capture_output=True, text=True, timeout=60
    )
    words = process.stdout.splitlines()
    assert {"KIND=ray", "VARIANT=cpu", "images/train.Dockerfile"} <= set(words)
    assert f"holdfast-ray-cpu:{version('holdfast')}" in words


def test_the_builder_installs_everything_by_hash_except_an_unlocked_torch() -> None:
    script = (IMAGES / "install.sh").read_text()
    open_ = []
    for line in (line.strip() for line in script.splitlines()):
        if re.match(r"(pip|/build/tools/bin/python -m pip) install", line):
            requires_hashes = "--require-hashes --no-deps" in line
            if not requires_hashes and "--no-index" not in line:
                open_.append(line)
    assert open_ == []
    assert [line for line in script.splitlines() if "$pip install" in line or ") pip install" in line] == [
        "        cpu) TORCH=$3 sh torch.sh cpu $pip install --quiet --no-compile ;;",
        '        *) pip install --quiet --no-compile "${3:-torch}" ;;',
    ]
    assert "are not checked by hash" in script
    assert re.search(r"^pip_version=\d+\.\d+", script, re.M)


def test_only_what_the_images_need_reaches_a_builder() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = {line[1:] for line in patterns if line.startswith("!")}
    assert allowed == {
        "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "holdfast",
        "images/install.sh", "images/lock.txt", "images/torch.sh", "images/torch.*.lock", "images/selfcheck.py",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in allowed if "*" not in name)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["heavy"], {}, "heavy: name light"),
        (["train-amd"], {"BUILDER": "buildah"}, "set BASE to the vendor's image"),
        (["ray-gaudi"], {"BUILDER": "buildah"}, "ray-gaudi: set BASE to the vendor's image"),
        (["--release"], {"BUILDER": "buildah", "HOLDFAST_GIT_COMMIT": "0a1b-dirty"}, "commit every change first"),
        (
            ["--release"],
            {"BUILDER": "buildah", "HOLDFAST_GIT_COMMIT": "0a1b", "BASE": "python:3.11"},
            "with its digest",
        ),
        (
            ["--release", "train-cpu"],
            {"BUILDER": "buildah", "HOLDFAST_GIT_COMMIT": "0a1b", "BASE": "python:3.11@sha256:0a"},
            "there is no images/torch.cpu.lock",
        ),
        (
            ["--release", "train-nvidia"],
            {
                "BUILDER": "buildah",
                "HOLDFAST_GIT_COMMIT": "0a1b",
                "BASE": "python:3.11@sha256:0a",
                "TORCH": "torch==2.12.0",
            },
            "TORCH=torch==2.12.0 is not in images/torch.nvidia.lock",
        ),
        (["light"], {"BUILDER": "kaniko"}, "BUILDER=kaniko"),
    ],
)
def test_the_build_refuses_what_cannot_become_an_image(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", **environment}
    command = [str(IMAGES / "build.sh"), *arguments]
    process = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2
    assert message in process.stderr


def test_an_extended_image_adds_packages_by_hash_and_stays_unprivileged() -> None:
    steps = instructions(IMAGES / EXTENSION)
    (install,) = (rest for word, rest in steps if word == "RUN" and "pip install" in rest)
    assert install.startswith("--mount=type=secret,id=pip.conf,target=/etc/pip.conf ")
    assert {"--require-hashes", "--no-deps"} <= set(install.split())
    final = final_stage(IMAGES / EXTENSION)
    assert [word for word, _ in final] == ["FROM", "COPY", "COPY", "USER", "RUN"], "nothing is installed in the image"
    assert dict(final)["USER"] == "1000:1000"
    assert dict(final)["RUN"] == "holdfast-selfcheck"


def test_the_steps_of_an_extended_image_put_the_packages_of_the_lock_before_those_of_the_image(tmp_path: Path) -> None:
    """Without a builder: the commands of the Dockerfile, in folders."""
    build, venv = tmp_path / "build", tmp_path / "opt/holdfast/venv"
    build.mkdir()
    wheel = write_wheel(build, "odd_package", "2")
    lock = f"odd-package==2 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (build / "requirements.lock").write_text(lock)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    site = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with zipfile.ZipFile(write_wheel(tmp_path, "odd_package", "1")) as older:
        older.extractall(site)

    def placed(text: str) -> str:
        folders = {"/opt/holdfast/venv/lib/python3.11/site-packages": site, "/opt": tmp_path / "opt", "/build": build}
        return re.sub("|".join(map(re.escape, folders)), lambda found: str(folders[found[0]]), text)

    def extend() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(build), "PIP_REQUIRE_VIRTUALENV": "0"}
        command = placed(install).replace("pip install", f"{sys.executable} -m pip install", 1)
        return subprocess.run(command, shell=True, check=False, env=environment, capture_output=True, text=True)

    install = next(rest for word, rest in instructions(IMAGES / EXTENSION) if word == "RUN").split("/etc/pip.conf ")[1]
    assert (made := extend()).returncode == 0, made.stderr
    for word, rest in final_stage(IMAGES / EXTENSION):
        if word == "COPY":
            source, target = (Path(placed(path)) for path in rest.split()[1:])
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    show = (
        "import odd_package; from importlib.metadata import version; print(odd_package.VERSION, version('odd-package'))"
    )
    shown = subprocess.run([venv / "bin/python", "-c", show], check=True, capture_output=True, text=True, timeout=120)
    assert shown.stdout.split() == ["2", "2"]
    (build / "requirements.lock").write_text(lock.replace("sha256:", "sha256:0")[:-2] + "\n")
    assert extend().returncode != 0, "another file than that of the lock is refused"


def write_wheel(folder: Path, name: str, number: str) -> Path:
    """A package with one module, as a wheel."""
    path, metadata = folder / f"{name}-{number}-py3-none-any.whl", f"{name}-{number}.dist-info"
    files = {
        f"{name}.py": f"VERSION = '{number}'\n",
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{metadata}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{metadata}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path
