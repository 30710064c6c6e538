"""Promotion to champion, in a fixed order for concurrent registrations.

MLflow moves an alias without any condition. Of two models judged against the same champion, the later one would replace
the earlier one without a comparison. No rollback would find the earlier one. So a champion is first claimed in the
store, by number. Each champion was judged against the one that it replaces, if the registrations share a store. A claim
of a dead process is applied by the next one.
"""

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
    """Make `version`, which is registered from the first of `stores`, the champion. `require_fresh` receives the
    champion that it would replace, and raises if that is not allowed. If nothing is `compared`, a foreign champion
    is replaced too. Raises TrackingUnavailable and ForeignVersionError."""
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
    while (last := newest(store, folder)) > number + 1:  # other processes claimed meanwhile: their version is newer
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
    """Apply the newest claim to MLflow, unless it was applied before. A person may have chosen another version
    since."""
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
