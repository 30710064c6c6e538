"""The report: complete, self-contained, safe against quoted text, and small for runs of any length."""

import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from holdfast.components.evaluate.checks import checks, decide
from holdfast.components.evaluate.report import draw
from holdfast.pages.charts import Chart, Series, draw_chart, smooth, thin
from holdfast.scoring import Measured, Verdict
from holdfast.scoring.verdict import Opponent, Sample
from holdfast.spec import Spec
from holdfast.store import Store, layout
from holdfast.store.sequence import record_key
from holdfast.telemetry import emit, recording
from holdfast.telemetry.channel import line_of
from holdfast.telemetry.events import LaunchEnded
from tests.evaluate import world
from tests.telemetry.test_ledger import killed_once

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<b>"
FINE = Measured(loss=2.0, perplexity=math.exp(2), bits_per_byte=1.0, tokens=100, text_bytes=300)
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """The tags and texts of a page. Fails on an unclosed tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def verdict(champion: Opponent | None = None, samples: tuple[Sample, ...] = (), **measured: float) -> Verdict:
    figures = FINE.model_copy(update=measured)
    settings = world.spec("evaluation.max_loss=3").evaluation
    results = checks(settings, figures, champion)
    word, reasons = decide(results)
    return Verdict(
        word=word, reasons=reasons, checks=results, metrics=figures.figures, champion=champion, samples=samples,
        run_id=world.RUN, dataset_id=world.DATASET, step=40, checkpoint="runs/x/checkpoints/step-40.json",
        export="runs/x/export/step-40/", export_digest="e" * 16, state_digest="d" * 16, key="k-none",
        settings=settings, device="cpu",
    )  # fmt: skip


def opponent(**changes: object) -> Opponent:
    fields = {"registry": "here", "model": "m", "version": 1, "run_id": "c" * 16, "state_digest": "e" * 16}
    return Opponent.model_validate({**fields, "measured": None, "note": "Same.", **changes})


def page(store: Store, given: Verdict, spec: Spec | None = None) -> tuple[str, Page]:
    html = draw(spec or world.spec(), given, world.write_dataset(store), store)
    return html, Page(html)


def test_the_page_shows_verdict_curves_data_lineage_and_attempts(store: Store) -> None:
    store.put(layout.result(world.RUN), b'{"seconds": 3700, "parameters": 1234567, "tokens": 98765432}')
    world.write_history(store, 200, attempts=3)
    with recording(store, world.RUN, "train"):
        emit(LaunchEnded(launch=1, code=137, restart_in=0, detail="rank 1 <i>on node-7</i>"))
    _, read = page(store, verdict())
    text = " ".join(read.texts)
    for expected in (
        "launch 1 ended (killed); starting the next in 0 s: rank 1 <i>on node-7</i>",
        "blessed", "Held-out loss 2.0000 is below the bound 3.", "1 h 1 min", "1.235M", "98.77M",
        "Training loss, nats a token", "Gradient norm", "Learning rate", "Throughput, tokens a second",
        "interrupted 2 times", "node-3", "corpus/*.txt", "Dropped: duplicate", "runs/x/checkpoints/step-40.json",
        "3 duplicate, the first: corpus/a.txt repeats an earlier one ('to be')", "2 left out, named pipe: corpus/pipe",
        "0123456789abcdef", "attempt 2 resumed at step 68", "name: tiny",
    ):  # fmt: skip
        assert expected in text, expected
    assert read.tags.count("svg") == 4
    assert "Dropped: too short" not in text, "a reason that dropped nothing is not shown"


def test_the_page_shows_the_curves_of_answers(store: Store) -> None:
    names = ("reward", "answer_tokens", "kl", "entropy", "no_signal_share")
    world.write_history(store, 40, more={f"objective.{name}": 0.5 for name in names})
    text = " ".join(page(store, verdict())[1].texts)
    for title in (
        "Reward of an answer",
        "Length of an answer",
        "Divergence from",
        "Entropy of",
        "Groups whose answers",
    ):
        assert title in text, title


def test_nothing_is_loaded_and_nothing_runs(store: Store) -> None:
    world.write_history(store, 50)
    html, read = page(store, verdict())
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import", html)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes


def test_hostile_text_is_escaped(store: Store) -> None:
    measured = FINE.model_copy(update={"bits_per_byte": 1.1})
    champion = opponent(model=HOSTILE, run_id=HOSTILE, measured=measured, note=HOSTILE)
    manifest = world.write_dataset(store)
    source = manifest.sources[0].model_copy(update={"uri": HOSTILE, "dropped": {HOSTILE: 1}})
    manifest = manifest.model_copy(update={"sources": (source,)})
    store.put(record_key(layout.attempts(world.RUN), 1), b'{"host": "<script>alert(2)</script>", "claimed": 1}')
    world.write_history(store, 5)
    spec = world.spec('evaluation.prompts=["</pre><script>alert(3)</script>"]')
    html = draw(spec, verdict(champion, (Sample(prompt=HOSTILE, text=HOSTILE),)), manifest, store)
    read = Page(html)
    assert not {"script", "img"} & set(read.tags)
    assert "".join(read.texts).count(HOSTILE) >= 5


def test_the_page_shows_what_the_ranks_did_with_their_time_and_what_that_cost(store: Store) -> None:
    html, _ = page(store, verdict())
    assert "What every rank did" not in html  # no rank reported its time
    events = [
        event.model_copy(update={"number": number, "time": event.time + 1000})
        for number, event in enumerate(killed_once(), 1)
    ]
    store.put(layout.events(world.RUN, "w", 0), b"".join(map(line_of, events)))
    html, read = page(store, verdict(), world.spec("cluster.prices.accelerator_hour=36", "cluster.prices.currency=EUR"))
    assert "What every rank did with its time" in read.texts
    assert "rank 1: lost" in html
    assert {"Goodput", "23.5 %", "Accelerator-hours", "1.02", "EUR, 99.61 a million tokens"} <= set(read.texts)


def test_a_model_of_nan_and_a_run_without_history_still_have_a_page(store: Store) -> None:
    _, read = page(store, verdict(loss=math.nan, perplexity=math.nan, bits_per_byte=math.nan))
    text = " ".join(read.texts)
    assert "not blessed" in text
    assert "fewer than two steps" in text
    world.write_history(store, 5)
    page(store, verdict(loss=math.nan))


def test_the_comparison_with_the_champion_shows_both_and_the_change(store: Store) -> None:
    measured = FINE.model_copy(update={"bits_per_byte": 1.25})
    _, read = page(store, verdict(opponent(version=7, measured=measured)))
    assert {"Champion: m version 7", "1.2500", "-20.00%"} <= set(read.texts)


def test_a_long_run_makes_a_page_of_bounded_size(store: Store) -> None:
    world.write_history(store, 20_000)
    html, _ = page(store, verdict())
    assert len(html) < 300_000


def test_every_chart_is_well_formed_with_a_text_description() -> None:
    series = [Series("loss", [(step, 5 / step) for step in range(1, 1000)])]
    svg = draw_chart(Chart("Loss", series, level=("held-out", 0.5), marks=[(500, "<resumed>")]))
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "Loss: loss from 5 at step 1 to 0.005005 at step 999"
    assert "<resumed>" in [element.text for element in root.iter() if element.tag.endswith("title")]
    assert "too few" in draw_chart(Chart("Loss", [Series("loss", [(1, 2.0)])]))
    flat = draw_chart(Chart("Flat", [Series("x", [(1, 0.0), (2, 0.0), (3, math.nan)])]))
    assert "nan" not in flat


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[7_777] = (7_777.0, 99.0)
    points[5_001] = (5_001.0, -99.0)
    thinned = thin(points, 100)
    assert len(thinned) <= 100
    assert {points[0], points[-1], points[7_777], points[5_001]} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin(points[:50], 100) == points[:50]


def test_smoothing_keeps_a_straight_line_and_both_ends() -> None:
    line = [(float(x), 2.0 * x) for x in range(500)]
    assert all(abs(after[1] - before[1]) < 1e-9 for before, after in zip(line, smooth(line), strict=True))


def test_other_files_in_the_attempts_folder_are_not_attempts(store: Store) -> None:
    world.write_history(store, 40, attempts=2)
    from holdfast.components.evaluate.report import _attempts

    store.put(layout.attempts(world.RUN) + "000001.note.json", b'{"code": 137}')
    assert [attempt.number for attempt in _attempts(store, world.RUN, [])] == [1, 2]
