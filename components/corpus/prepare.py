"""From the `data` section of a spec to a dataset in the store.

Promises that the same sources, settings and tokenizer give the same dataset id and the same bytes, whatever the number
of workers and however often it was killed in between; that a finished dataset is returned at once; and that nothing is
visible under the id before everything is there: writing dataset.json is the commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from pydantic import BaseModel, ConfigDict

from holdfast.components.corpus.identity import dataset_settings, identity_of
from holdfast.components.corpus.sources import ResolvedSource, resolve
from holdfast.components.dataset.dataset import damaged_shards
from holdfast.components.dataset.manifest import Lineage, Manifest, load_manifest
from holdfast.components.dataset.manifest import Tokenizer as TokenizerEntry
from holdfast.components.runtime.logs import log
from holdfast.components.spec import Spec, digest
from holdfast.components.spec.data import Data
from holdfast.components.spec.errors import DataError
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import ConsoleProgress, Progress

TOKENIZER_FILE = "tokenizer.json"


class Prepared(BaseModel):
    """What preprocess made, or found made already."""

    model_config = ConfigDict(frozen=True)

    dataset_id: str
    url: str  # of dataset.json
    created: bool  # False: the dataset was there already
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    text_bytes: dict[str, int]  # by split
    dropped: dict[str, int]  # documents, by reason
    vocabulary: int
    lineage: list[Lineage]  # of each source, as it is now
    units: int  # pieces of the sources; 0 when the dataset was there already
    units_reused: int  # of them, those that an earlier preprocess had tokenised
    seconds: float


def prepare(spec: Spec, store: Store, progress: Progress | None = None) -> Prepared:
    """Prepare the dataset of a spec in `store`. `progress` is called with (phase, done, total).

    Raises DataError for text or a tokenizer that cannot be used, MissingError for sources that are not there.
    """
    started = time.monotonic()
    sources = resolve(spec.data)
    dataset_id = identity_of(spec.data, sources)
    manifest = _finished(store, dataset_id)
    units = reused = 0
    created = manifest is None
    if manifest is None:
        with ConsoleProgress() if progress is None else nullcontext(progress) as report:
            manifest, units, reused = _build(spec.data, dataset_id, sources, store, report)
    return _prepared(manifest, store, created, sources, units, reused, time.monotonic() - started)


def _finished(store: Store, dataset_id: str) -> Manifest | None:
    """The manifest of a dataset that is there and whole as far as sizes tell."""
    if store.stat(layout.dataset(dataset_id)) is None:
        return None
    try:
        manifest = load_manifest(store, dataset_id)
    except DataError as error:
        log.warning("%s: building it again", error)
        store.delete(layout.dataset(dataset_id))
        return None
    if damaged := damaged_shards(store, manifest):
        name, problem = next(iter(damaged.items()))
        log.warning(
            "dataset %s: %d damaged files (%s %s): building them again", dataset_id, len(damaged), name, problem
        )
        return None
    return manifest


def _build(
    data: Data, dataset_id: str, sources: Sequence[ResolvedSource], store: Store, progress: Progress
) -> tuple[Manifest, int, int]:
    from holdfast.components.corpus.assemble import Unit, assemble
    from holdfast.components.corpus.pool import cores, tokenise_all
    from holdfast.components.corpus.tokenizer import prepare as prepare_tokenizer
    from holdfast.components.corpus.units import Job, plan

    pieces = plan(sources)
    total = sum(piece.bytes for piece in pieces)
    log.info("dataset %s: %d files, %d bytes", dataset_id, sum(len(source.files) for source in sources), total)
    corpus = digest([[piece.key(None) for piece in pieces]])
    tokenizer = prepare_tokenizer(data, corpus, pieces, store)
    job = Job(tokenizer.json, tokenizer.digest, tokenizer.dtype, tokenizer.end_of_text, data.cleaning)
    done = reused = 0
    for outcome in tokenise_all(pieces, job, store, data.workers or cores()):
        done, reused = done + outcome.bytes, reused + outcome.reused
        progress("tokenise", done, total)
    store.put(layout.dataset(dataset_id, TOKENIZER_FILE), tokenizer.json.encode())
    manifest_sources, flaws = assemble(
        store,
        dataset_id,
        sources,
        [Unit(piece.source, piece.key(job.settings)) for piece in pieces],
        deduplicate=data.cleaning.deduplicate,
        validation_fraction=data.validation_fraction,
        shard_tokens=data.shard_tokens,
        dtype=tokenizer.dtype,
        progress=lambda number, count: progress("pack", number, count),
    )
    for flaw in flaws[:20]:
        log.warning("skipped: %s", flaw)
    manifest = Manifest(
        dataset_id=dataset_id,
        tokenizer=TokenizerEntry(
            file=TOKENIZER_FILE,
            digest=tokenizer.digest,
            vocabulary=tokenizer.vocabulary,
            end_of_text=data.tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text,
        ),
        sources=manifest_sources,
        settings=dataset_settings(data),
    )
    _refuse_empty(manifest)
    return _commit(store, manifest), len(pieces), reused


def _commit(store: Store, manifest: Manifest) -> Manifest:
    """Make the dataset visible. What another preprocess committed meanwhile under this id has the same shards."""
    if store.put_if_absent(layout.dataset(manifest.dataset_id), manifest.dump()):
        return manifest
    there = load_manifest(store, manifest.dataset_id)
    if there.shards() != manifest.shards() or there.tokenizer != manifest.tokenizer:
        raise DataError(
            f"{store.url}/{layout.dataset(manifest.dataset_id)}: another version of the libraries gave other tokens "
            "for the same input; delete the dataset's folder and run preprocess again"
        )
    return there


def _refuse_empty(manifest: Manifest) -> None:
    if not manifest.tokens("train"):
        reasons = _sum(source.dropped for source in manifest.sources)
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        held = sum(source.splits["validation"].documents for source in manifest.sources)
        raise DataError(
            f"data.sources: no document is left to train on (dropped: {dropped}; held out: {held}); add text, loosen "
            "data.cleaning, or lower data.validation_fraction"
        )
    if manifest.settings["validation_fraction"] and not manifest.tokens("validation"):
        log.warning(
            "dataset %s: no document fell into the held-out split; evaluation will have nothing to score: raise "
            "data.validation_fraction or add documents",
            manifest.dataset_id,
        )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for reason, number in count.items():
            total[reason] = total.get(reason, 0) + number
    return dict(sorted(total.items()))


def _prepared(
    manifest: Manifest,
    store: Store,
    created: bool,
    sources: Sequence[ResolvedSource],
    units: int,
    reused: int,
    seconds: float,
) -> Prepared:
    splits = {name: [source.splits[name] for source in manifest.sources] for name in ("train", "validation")}
    return Prepared(
        dataset_id=manifest.dataset_id,
        url=f"{store.url}/{layout.dataset(manifest.dataset_id)}",
        created=created,
        documents={name: sum(split.documents for split in parts) for name, parts in splits.items()},
        tokens={name: sum(split.tokens for split in parts) for name, parts in splits.items()},
        text_bytes={name: sum(split.text_bytes for split in parts) for name, parts in splits.items()},
        dropped=_sum(source.dropped for source in manifest.sources),
        vocabulary=manifest.tokenizer.vocabulary,
        lineage=[resolved.lineage for resolved in sources],
        units=units,
        units_reused=reused,
        seconds=round(seconds, 3),
    )
