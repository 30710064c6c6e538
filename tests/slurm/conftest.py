"""One real Slurm for the tests of a file; they skip, with the reason, where none can be started."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes."""
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # its path is part of socket names: it must be short
        Path(folder).chmod(0o755)
        with SlurmCluster(Path(folder)) as cluster:
            yield cluster
