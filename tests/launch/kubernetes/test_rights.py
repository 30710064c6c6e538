"""The manifests grant exactly the permissions that the launcher uses in these tests; the server refuses any other."""

from pathlib import Path

import pytest
import yaml

from tests.cluster.api import ALLOWED, PLURALS

ROLE = Path(__file__).parents[3] / "manifests" / "components" / "launcher" / "role.yaml"


@pytest.mark.skipif(not ROLE.exists(), reason="no manifests here")
def test_the_role_of_the_manifests_grants_what_the_launcher_uses() -> None:
    role = yaml.safe_load(ROLE.read_text())
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    for resource, verbs in ALLOWED.items():
        group = PLURALS[resource.partition("/")[0]]
        assert verbs <= granted.get((group, resource), set()), f"{resource}.{group} needs {sorted(verbs)}"
