"""Preparation: from the `data` section of a spec to a dataset in the store.

The same sources, settings and tokenizer give the same dataset id and the same bytes. Neither the number of workers nor
kills change them. A finished dataset is returned immediately. Nothing is visible under the id before everything is
written: writing dataset.json is the commit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from pydantic import BaseModel

from holdfast.corpus.identity import dataset_settings, identity_of, sample_tokens
from holdfast.corpus.own import enter_own_code
from holdfast.corpus.sources import resolve
from holdfast.dataset.dataset import damaged_shards
from holdfast.dataset.manifest import Example, Lineage, Manifest, load_manifest
from holdfast.dataset.manifest import Tokenizer as TokenizerEntry
from holdfast.runtime.logs import log
from holdfast.spec import Spec
from holdfast.spec.data import Data
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout
from holdfast.telemetry import ConsoleProgress, Progress

if TYPE_CHECKING:
    from holdfast.corpus.shard_plan import ShardPlan
    from holdfast.corpus.units import Piece

TOKENIZER_FILE = "tokenizer.json"
FINISHED = "finished"
SHARE_BYTES = 2**30  # bytes of the sources per share, unless that makes too few or too many shares


class Prepared(BaseModel, frozen=True):
    """The result of preprocess, with a new or an existing dataset."""

    dataset_id: str
    url: str  # of dataset.json
    created: bool  # False: the dataset already existed
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    text_bytes: dict[str, int]  # by split
    dropped: dict[str, int]  # documents, by reason
    examples: dict[str, Example]  # the first one for each reason
    vocabulary: int
    lineage: list[Lineage]  # of each source, in its current state
    units: int  # pieces of the sources; 0 if the dataset already existed
    units_reused: int  # units that an earlier preprocess tokenized
    seconds: float


class Divided(BaseModel, frozen=True):
    """The result of divide: how to share the work on a dataset."""

    dataset_id: str
    division: str  # the name of the units' list in the store, or FINISHED: the dataset already exists
    shares: list[str]  # `I/N`, one for each run of `tokenise`; never empty
    units: int
    bytes: int  # of the sources, as stored


class Tokenised(BaseModel, frozen=True):
    """The result of one worker."""

    share: str
    units: int
    units_reused: int  # units that already existed
    bytes: int
    seconds: float


def divide(spec: Spec, store: Store, shares: int = 0) -> Divided:
    """Divide the corpus of a spec into units for several workers, and make its tokenizer. This is all the work that one
    process must do before them. `shares` is the number of shares. Its default follows from `data.fan_out` and the size
    of the corpus.

    Raises what `prepare` raises, except for refused records: the workers report those.
    """
    from holdfast.corpus.shard_plan import MAX_SHARES, plan_shards, save

    enter_own_code(spec, store)
    sources = resolve(spec.data)
    dataset_id = identity_of(spec, sources)
    if _finished(store, dataset_id) is not None:
        log.info("dataset %s exists already", dataset_id)
        return Divided(dataset_id=dataset_id, division=FINISHED, shares=["0/1"], units=0, bytes=0)
    division = plan_shards(spec.data, dataset_id, sources, store)
    total = sum(piece.bytes for piece in division.pieces)
    # Several shares per worker if they are large, so that a slow worker does not delay the rest.
    default_count = min(max(spec.data.fan_out, total // SHARE_BYTES), 4 * spec.data.fan_out)
    count = max(1, min(shares or default_count, len(division.pieces), MAX_SHARES))
    return Divided(
        dataset_id=dataset_id,
        division=save(division, spec.data, store, sample_tokens(spec)),
        shares=[f"{number}/{count}" for number in range(count)],
        units=len(division.pieces),
        bytes=total,
    )


def tokenise(spec: Spec, store: Store, division: str, share: str, progress: Progress | None = None) -> Tokenised:
    """Tokenize one share of a division: the units that are not in the store yet. Any number of shares may run
    concurrently, in any order and repeatedly. Two workers may even run the same share, because a unit has only one
    content.

    Raises DataError for text that cannot be used, and for a division of another spec.
    """
    from holdfast.corpus.shard_plan import load, parse_share

    started = time.monotonic()
    share_ = parse_share(share)
    enter_own_code(spec, store)
    units = reused = size = 0
    if division != FINISHED:
        plan = load(store, division, spec.data, share_, sample_tokens(spec))
        with ConsoleProgress() if progress is None else nullcontext(progress) as report:
            reused = _tokenise(spec.data, plan, [piece.here() for piece in plan.pieces], store, report)
        units, size = len(plan.pieces), sum(piece.bytes for piece in plan.pieces)
    seconds = round(time.monotonic() - started, 3)
    return Tokenised(share=share, units=units, units_reused=reused, bytes=size, seconds=seconds)


def prepare(spec: Spec, store: Store, progress: Progress | None = None, division: str = "") -> Prepared:
    """Prepare the dataset of a spec in `store`. `progress` is called with (phase, done, total).

    With the name of a `division` whose shares are tokenized, it only joins them. Missing units are made here. Raises
    DataError for text or a tokenizer that cannot be used, and MissingError for missing sources.
    """
    started = time.monotonic()
    enter_own_code(spec, store)
    divided_before = division not in ("", FINISHED)
    if divided_before:
        from holdfast.corpus.shard_plan import load

        plan = load(store, division, spec.data, packed=sample_tokens(spec))
        dataset_id, lineage = plan.dataset_id, [origin.lineage for origin in plan.sources]
    else:
        sources = resolve(spec.data)
        dataset_id, lineage = identity_of(spec, sources), [source.lineage for source in sources]
    manifest = _finished(store, dataset_id)
    created = manifest is None
    units = reused = 0
    if manifest is None:
        with ConsoleProgress() if progress is None else nullcontext(progress) as report:
            if divided_before:
                manifest, rebuilt = _join(spec, plan, store, report)
                reused = len(plan.pieces) - rebuilt
            else:
                from holdfast.corpus.shard_plan import plan_shards

                plan = plan_shards(spec.data, dataset_id, sources, store)
                reused = _tokenise(spec.data, plan, plan.pieces, store, report)
                manifest, _ = _join(spec, plan, store, report)
        units = len(plan.pieces)
    return _prepared(manifest, store, created, lineage, units, reused, time.monotonic() - started)


def _finished(store: Store, dataset_id: str) -> Manifest | None:
    """The manifest of an existing dataset that is complete according to its sizes, or None."""
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


def _tokenise(data: Data, division: ShardPlan, pieces: Sequence[Piece], store: Store, progress: Progress) -> int:
    """Make sure that the units of `pieces` are in the store. Returns how many already existed."""
    from holdfast.corpus.pool import cores, tokenise_all

    total = sum(piece.bytes for piece in pieces)
    finished = reused = 0
    for outcome in tokenise_all(pieces, division.job(data), store, data.workers or cores()):
        finished, reused = finished + outcome.bytes, reused + outcome.reused
        progress("tokenise", finished, total)
    return reused


def _join(spec: Spec, division: ShardPlan, store: Store, progress: Progress) -> tuple[Manifest, int]:
    """Make the dataset of finished units. Returns its manifest, and the number of missing units that it made."""
    from holdfast.corpus.assemble import UnitReader, assemble

    data, tokenizer, packed = spec.data, division.tokenizer, sample_tokens(spec)
    settings = dataset_settings(data, packed)
    if tokenizer.template:
        settings["chat"] = {**json.loads(tokenizer.template), "packed": packed, "kind": data.kind}
    store.put(layout.dataset(division.dataset_id, TOKENIZER_FILE), tokenizer.json.encode())
    units = UnitReader(store, division.pieces, division.job(data))
    manifest_sources, flaws = assemble(
        store,
        division,
        units,
        cleaning=data.cleaning,
        validation_fraction=data.validation_fraction,
        shard_tokens=data.shard_tokens,
        packed=packed,
        progress=lambda number, count: progress("pack", number, count),
    )
    for flaw in flaws:
        log.warning("skipped: %s", flaw)
    manifest = Manifest(
        dataset_id=division.dataset_id,
        tokenizer=TokenizerEntry(
            file=TOKENIZER_FILE,
            digest=tokenizer.digest,
            vocabulary=tokenizer.vocabulary,
            end_of_text=data.tokenizer.end_of_text,
            end_of_text_id=tokenizer.end_of_text,
        ),
        sources=manifest_sources,
        settings=settings,
    )
    _refuse_empty(manifest)
    for line in manifest.drops():
        log.info("dataset %s: not in it: %s", division.dataset_id, line)
    return _commit(store, manifest), len(units.rebuilt)


def _commit(store: Store, manifest: Manifest) -> Manifest:
    """Make the dataset visible. A concurrent commit under this id must have the same shards. Raises DataError if
    they differ."""
    if store.put_if_absent(layout.dataset(manifest.dataset_id), manifest.dump()):
        return manifest
    committed = load_manifest(store, manifest.dataset_id)
    if committed.shards() != manifest.shards() or committed.tokenizer != manifest.tokenizer:
        raise DataError(
            f"{store.url}/{layout.dataset(manifest.dataset_id)}: another version of the libraries gave other tokens "
            "for the same input; delete the dataset's folder and run preprocess again"
        )
    return committed


def _refuse_empty(manifest: Manifest) -> None:
    if not manifest.tokens("train"):
        dropped = ", ".join(f"{count} {reason}" for reason, count in manifest.dropped().items()) or "none"
        kept = sum(source.splits["validation"].documents for source in manifest.sources)
        raise DataError(
            f"data.sources: no document is left to train on (dropped: {dropped}; held out: {kept}); add text, loosen "
            "data.cleaning, or lower data.validation_fraction" + "".join(f"\n    {line}" for line in manifest.drops())
        )
    if manifest.settings["validation_fraction"] and not manifest.tokens("validation"):
        log.warning(
            "dataset %s: no document fell into the held-out split; evaluation will have nothing to score: raise "
            "data.validation_fraction or add documents",
            manifest.dataset_id,
        )


def _prepared(
    manifest: Manifest,
    store: Store,
    created: bool,
    lineage: list[Lineage],
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
        dropped=manifest.dropped(),
        examples={reason: example for reason in manifest.dropped() if (example := manifest.example(reason))},
        vocabulary=manifest.tokenizer.vocabulary,
        lineage=lineage,
        units=units,
        units_reused=reused,
        seconds=round(seconds, 3),
    )
