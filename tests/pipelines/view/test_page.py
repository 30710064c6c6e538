"""The page of a training as a file: it grows during the run, and makes browsers reload it until the run ends."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.pipelines.view.page import AGAIN, TrainingPage
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout, open_store
from holdfast.telemetry.channel import line_of
from holdfast.telemetry.events import Event, Progress, TimeSpent
from tests.telemetry.histories import write_committed
from tests.telemetry.test_ledger import at, killed_once
from tests.train.tiny_run import tiny_spec

RUN = "00000000000000aa"
REFRESH = f'<meta http-equiv="refresh" content="{AGAIN}">'


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


def tell(store: Store, events: Sequence[Event]) -> None:
    lines = (line_of(event.model_copy(update={"number": number})) for number, event in enumerate(events, 1))
    store.put(layout.events(RUN, "w", 0), b"".join(lines))


def progress(time: float, step: int) -> Event:
    return at(time, Progress(step=step, steps=12, loss=9 - step, tokens_per_second=100.0, seconds_left=1.0), 1)


def test_the_page_grows_with_the_run_and_stops_asking_when_it_has_ended(store: Store, tmp_path: Path) -> None:
    events = killed_once()
    page = TrainingPage(tiny_spec("cluster.prices.accelerator_hour=36"), RUN, store, tmp_path / "pages" / "run.html")
    tell(store, [*events[:5], progress(8, 1)])
    page.write(follow=True)
    first = page.path.read_text()
    assert page.is_active
    assert REFRESH in first
    assert "step 1 of 12 · as of " in first
    assert "too few steps to draw" in first

    tell(store, [*events[:5], progress(8, 1), progress(9, 5), progress(10, 6)])
    page.write(follow=True)
    html = page.path.read_text()
    assert REFRESH in html
    assert "step 6 of 12" in html
    assert "<polyline" in html

    tell(store, [*events[:5], progress(8, 1), progress(9, 5), progress(10, 6), *events[5:]])
    write_committed(store, RUN, 0, [{"step": step, "loss": 9.0 - step, "grad_norm": 1.0} for step in range(1, 13)])
    page.write(follow=True)
    whole = page.path.read_text()
    assert not page.is_active
    assert 'http-equiv="refresh"' not in whole
    assert "step 12 of 12" in whole and "as of" not in whole
    assert "Accelerator-hours" in whole
    assert [path.name for path in page.path.parent.iterdir()] == ["run.html"]
    page.write(follow=True)
    assert page.path.read_text() == whole
    fresh = TrainingPage(tiny_spec("cluster.prices.accelerator_hour=36"), RUN, store, tmp_path / "fresh.html")
    fresh.write(follow=True)
    assert fresh.path.read_bytes() == page.path.read_bytes()


def test_the_page_has_every_accelerator_with_its_driver_metrics(store: Store, tmp_path: Path) -> None:
    page = TrainingPage(tiny_spec(), RUN, store, tmp_path / "run.html")
    events = killed_once()[:5]
    tell(store, events)
    page.write(follow=True)
    assert "ccelerators" not in page.path.read_text().replace("Accelerator-hours", "")
    readings = [
        at(10 + step, TimeSpent(rank=rank, step=step, utilisation=0.5 + rank / 4, watts=500.0 + 100 * rank), 1)
        for step in (1, 2) for rank in (0, 1)
    ]  # fmt: skip
    readings[-1] = readings[-1].model_copy(update={"clock_reasons": 0x40})
    tell(store, [*events, *readings])
    page = TrainingPage(tiny_spec(), RUN, store, tmp_path / "run.html")
    page.write(follow=True)
    html = page.path.read_text()
    for phrase in ("<td>1</td><td>75 %</td><td>600 W</td>", "<td>too hot</td>", "Power of an accelerator, watts",
                  '<span class="key second"></span>highest', '<span class="key third"></span>mean',
                  "step 2\nhighest: 600\nmean: 550"):  # fmt: skip
        assert phrase in html, phrase
    assert "Temperature of an accelerator" not in html  # no event has it


def test_a_place_that_cannot_be_written_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="--output"):
        TrainingPage(tiny_spec(), RUN, store, tmp_path / "file" / "page.html").write(follow=False)
