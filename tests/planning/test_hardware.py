"""The table of accelerators: nothing is guessed, everything can be replaced."""

from pathlib import Path

import pytest

from holdfast.planning import ACCELERATORS, accelerator
from holdfast.spec.errors import MissingError, SpecError


def test_an_accelerator_that_is_not_in_the_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"(?s)not guessed.*X9000.*A100.*MI300X"):
        accelerator("X9000")


def test_every_accelerator_names_the_source_of_its_figures() -> None:
    assert all(accelerator.source for accelerator in ACCELERATORS.values())


def test_names_are_found_in_any_case_and_figures_are_replaced() -> None:
    assert accelerator("h100", price=1.25).price == 1.25
    assert accelerator("mi300x").memory == 192e9


def test_a_file_describes_another_one_or_what_is_different(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: H100\nnetwork: 100.0e9\nprice: 2\n")
    custom = accelerator(str(path))
    assert (custom.name, custom.network, custom.price, custom.memory) == ("mine", 100e9, 2, 80e9)


def test_an_invalid_hardware_file_is_refused_with_the_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: H100\nnetwork: -1\nspeed: 3\n")
    with pytest.raises(SpecError, match=r"(?s)network.*speed"):
        accelerator(str(path))
    with pytest.raises(MissingError, match=r"nowhere\.yaml"):
        accelerator("nowhere.yaml")


def test_a_precision_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(SpecError, match="fp8"):
        accelerator("A100").peak("fp8")
