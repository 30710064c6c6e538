"""`holdfast data`: what is in the dataset of a spec, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, SpecFile, StoreRoot, out, print_json

if TYPE_CHECKING:
    from holdfast.corpus.overview import Overview


def data(
    spec: SpecFile,
    samples: Annotated[int, typer.Option(min=0, max=256, help="Samples on the page.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file of the page. Default: under HOLDFAST_HOME.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Prepare the dataset of a spec, and show what is in it, before anything is trained.

    Prints documents, tokens, what was dropped with an example of each reason, and the lengths of documents. Writes an
    HTML page that also has samples as the model sees them, with the tokens that count in color. A run of the spec uses
    the same dataset.

    Example: holdfast data examples/quickstart.yaml
    """
    from holdfast.api.specs import describe_data
    from holdfast.pipelines.paths import load_spec
    from holdfast.runtime.environment import home

    found = describe_data(load_spec(spec, overrides or ()), store=store, samples=samples)
    page = output or home() / "reports" / f"dataset-{found.dataset_id}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(found.page(), encoding="utf-8")
    if as_json:
        print_json({**found.as_dict(), "page": page})
        return
    _show(found)
    out(f"page: {page}")


def _show(found: Overview) -> None:
    out(f"dataset {found.dataset_id}: {found.kind}, {found.epochs:.2f} epochs in the steps of the spec")
    for split, documents in found.documents.items():
        out(f"  {split}: {documents:,} documents, {found.tokens[split]:,} tokens")
    for source in found.sources:
        revision = f" ({source.revision})" if source.revision else ""
        out(f"  {source.uri}{revision}: {source.documents:,} documents, {source.tokens:,} training tokens")
        for line in source.left_out:
            out(f"    {line}")
    if found.dropped:
        out("dropped:")
    for drop in found.dropped:
        out(f"  {drop.count:,} {drop.reason.replace('_', ' ')}, the first: {drop.place}: {drop.detail}")
        if drop.excerpt:
            out(f"    {drop.excerpt}")
    most = max((each.documents for each in found.histogram), default=1)
    out("tokens of a training document:")
    for each in found.histogram:
        bar = "#" * max(1, 40 * each.documents // most) if each.documents else ""
        out(f"  {each.low:>9,} to {each.high:>9,}  {each.documents:>10,}  {bar}")
