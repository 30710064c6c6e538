"""`holdfast doctor --backend slurm` against a real Slurm."""

from pathlib import Path

import pytest

from tests.slurm.chain import Place
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.drill


def test_the_doctor_accepts_a_slurm_cluster_that_fits_the_spec(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    output = place.holdfast("doctor", str(place.spec), "--backend", "slurm")
    assert "OK    slurm partition: all is up, with 2 nodes" in output
    assert f"OK    slurm store: nodes see {tmp_path}/home/store" in output


def test_a_missing_partition_and_too_few_nodes_are_reported(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    spec = str(place.spec)
    absent = place.holdfast("doctor", spec, "--backend=slurm", "--set=cluster.slurm.partition=gone", code=15)
    assert "FAIL  slurm partition: there is no partition gone" in absent
    assert "use one of all, other" in absent
    three = ("--set=cluster.nodes={min: 3, max: 3}", "--set=training.global_batch=12")
    output = place.holdfast("doctor", spec, "--backend=slurm", *three, code=15)
    assert "FAIL  slurm partition: all has 2 nodes, not 3" in output


def test_a_folder_that_no_node_sees_is_reported(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    node = programs / "srun"  # all nodes of this Slurm see every folder of this machine: here one does not
    node.write_text(f'#!/bin/bash\nexec {slurm.path_of("srun")} "${{@:1:$#-2}}" cat /nowhere/else\n')
    node.chmod(0o755)
    place.environment["PATH"] = f"{programs}:{place.environment['PATH']}"
    output = place.holdfast("doctor", str(place.spec), "--backend", "slurm", code=15)
    assert f"FAIL  slurm store: no node sees {tmp_path}/home/store" in output
    assert "file system that all nodes share" in output


def test_the_doctor_reports_an_unreachable_controller(slurm: SlurmCluster, tmp_path: Path) -> None:
    place = Place(slurm, tmp_path)
    text = (slurm.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text("".join(
        line if not line.startswith("SlurmctldPort=") else "SlurmctldPort=1\n" for line in text.splitlines(True)
    ))  # fmt: skip
    place.environment["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    output = place.holdfast("doctor", "--backend", "slurm", code=207)
    assert "FAIL  slurm: sinfo" in output
