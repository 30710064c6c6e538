"""The model card and the bill of materials of a registered version."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from holdfast.components.register.registration import register
from holdfast.pipelines.exports import verify_export
from holdfast.store import Store, layout
from holdfast.tracking import connect, registration_key
from holdfast.tracking.registrations import content_digest
from tests.register.conftest import EXPORT, STEP, Finish
from tests.tracking import made


@pytest.mark.slow
def test_a_version_has_a_card_and_a_bill_of_materials(home: Path, store: Store, finish: Finish) -> None:
    finish(result={"tokens": 8, "parameters": 8, "attempts": 1, "seconds": 1.0})
    registered = register(made.spec("registration.license=Apache-2.0"), made.RUN_ID, store)
    keys = {
        name: layout.model_document(made.RUN_ID, registration_key("story"), name)
        for name in ("README.md", "sbom.cdx.json")
    }
    assert registered.documents == {name: content_digest(store.get(key)) for name, key in keys.items()}
    card = store.get(keys["README.md"]).decode()
    assert "license: apache-2.0" in card.split("---\n")[1]
    for fact in ("# story", "Apache-2.0", f"{STEP} steps", "loss: 1.25", "below the bound 9", registered.export_digest):
        assert fact in card
    description = connect().get_model_version("story", str(registered.version)).description
    assert description == card.split("---\n", 2)[2]
    bom = json.loads(store.get(keys["sbom.cdx.json"]))
    model = bom["metadata"]["component"]
    assert (model["name"], model["version"]) == ("story", registered.state_digest)
    assert model["licenses"] == [{"expression": "Apache-2.0"}]
    assert {"type": "loss", "value": "1.25"} in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    parts = {part["name"]: part for part in bom["components"]}
    assert parts["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert parts["mlflow"]["version"] == version("mlflow")
    assert parts["model.safetensors"]["type"] == "file"
    assert {part["bom-ref"] for part in bom["components"]} == set(bom["dependencies"][0]["dependsOn"])
    assert len({part["bom-ref"] for part in bom["components"]}) == len(bom["components"])
    assert verify_export(store, made.RUN_ID, EXPORT).damages == ()
    store.put(keys["README.md"], b"Public domain.")
    (damage,) = verify_export(store, made.RUN_ID, EXPORT).damages
    assert damage.key == keys["README.md"]


def test_without_a_licence_the_card_says_so(home: Path, store: Store, finish: Finish) -> None:
    finish()
    registered = register(made.spec(), made.RUN_ID, store)
    card = store.get(layout.model_document(made.RUN_ID, registration_key("story"), "README.md")).decode()
    assert "Not stated: `registration.license`" in card
    assert "license:" not in card.split("---\n")[1]
    assert registered.documents
