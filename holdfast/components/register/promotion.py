"""Who becomes champion when several registrations end at the same moment: one after the other.

MLflow moves an alias for whoever asks, and knows no condition: of two models that were each judged against the same
champion the later one would replace the earlier one, which nobody compared it with and no rollback would find. So a
champion is claimed in the store first, by number. Promises that each champion was judged against the one that it
replaces, as far as the registrations share a store, and that a claim whose process died is carried out by the next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from holdfast.spec.errors import ForeignVersionError, MissingError
from holdfast.store import Store, layout
from holdfast.store.sequence import newest, read_record, record_key
from holdfast.tracking import Champion, champion, promote, registration_key

log = logging.getLogger("holdfast.register")


def promote_in_order(
    stores: Sequence[Store],
    model: str,
    version: int,
    uri: str,
    require_fresh: Callable[[Champion | None], None],
    *,
    compared: bool = True,
) -> None:
    """Make `version`, which the first of `stores` has registered, the champion. `require_fresh` is given the champion
    that it would replace, and raises when it may not. Where nothing is `compared`, a foreign one is replaced as well.
    Raises TrackingUnavailable, and ForeignVersionError."""
    store = stores[0]
    folder = layout.champions(registration_key(model, uri))
    while True:
        number = newest(store, folder)
        _apply(store, folder, number, model, uri)
        now = _current_champion(stores, model, uri, compared)
        require_fresh(now)
        claim = {"version": version, "replaces": None if now is None else now.version}
        if store.put_if_absent(record_key(folder, number + 1), json.dumps(claim).encode()):
            break
    promote(model, version, store, uri)
    store.put(_done(folder, number + 1), b"")
    while (last := newest(store, folder)) > number + 1:  # this process was slow, and others went on: theirs is newer
        number = last - 1
        promote(model, read_record(store, folder, last)["version"], store, uri)


def _current_champion(stores: Sequence[Store], model: str, uri: str, compared: bool) -> Champion | None:
    try:
        return champion(model, stores, uri)
    except ForeignVersionError:
        if compared:
            raise
        return None


def _apply(store: Store, folder: str, number: int, model: str, uri: str) -> None:
    """See to it that the newest claim is what MLflow says, unless it was so before: a person may have chosen since."""
    if number and store.stat(_done(folder, number)) is None:
        version = read_record(store, folder, number)["version"]
        try:
            promote(model, version, store, uri)
        except (
            MissingError,
            ForeignVersionError,
        ) as error:  # deleted, or changed, in MLflow since
            log.warning("champion %d of %s is not made champion any more: %s", number, model, error)
        store.put(_done(folder, number), b"")


def _done(folder: str, number: int) -> str:
    return f"{folder}{number:06d}.done"
