"""A training script, and functions of a user, on a real Ray: killed, and resumed with the bits of a local run."""

from pathlib import Path

import pytest

from tests.ray.cluster import RayCluster
from tests.ray.place import Place
from tests.script.gated import Plugins, Script, ends_like_a_local_run
from tests.seeds import in_full

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("code", [Script, pytest.param(Plugins, marks=in_full)])
def test_code_of_a_user_that_loses_a_rank_ends_with_the_bits_of_a_local_run(
    ray: RayCluster, home: Path, code: type[Script] | type[Plugins]
) -> None:
    place = Place(ray, home.parent / code.__name__, home)
    ends_like_a_local_run(place, code(place), lambda run: ray.processes("--run-id", run)[0].kill())
