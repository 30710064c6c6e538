"""The manifests give the launcher the rights that it uses in these tests, where the server refuses any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.api import ALLOWED, PLURALS

ROLES = Path(__file__).parents[3] / "manifests" / "base" / "rbac.yaml"


@pytest.mark.skipif(not ROLES.exists(), reason="no manifests here")
def test_the_role_of_the_manifests_grants_what_the_launcher_uses() -> None:
    documents = [found for found in yaml.safe_load_all(ROLES.read_text()) if found]
    (role,) = (
        found for found in documents if found["kind"] == "Role" and found["metadata"]["name"] == "holdfast-launcher"
    )
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    for resource, verbs in ALLOWED.items():
        group = PLURALS[resource.partition("/")[0]]
        assert verbs <= granted.get((group, resource), set()), f"{resource}.{group} needs {sorted(verbs)}"
