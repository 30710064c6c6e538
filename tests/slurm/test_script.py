"""A training script, and functions of a user, on a real Slurm: killed, and resumed with the bits of a local run."""

from pathlib import Path

import pytest

from tests.script.gated import Plugins, Script, ends_like_a_local_run
from tests.seeds import in_full
from tests.slurm.chain import Place
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("code", [Script, pytest.param(Plugins, marks=in_full)])
def test_code_of_a_user_that_loses_its_job_step_ends_with_the_bits_of_a_local_run(
    slurm: SlurmCluster, tmp_path: Path, code: type[Script] | type[Plugins]
) -> None:
    place = Place(slurm, tmp_path)

    def strike(run: str) -> None:
        slurm.ask("scancel", f"{place.step(run, 'train')['pods'][-1]}.0")

    ends_like_a_local_run(place, code(place), strike)
