"""One of several processes that write the same data to MLflow: `python -m tests.tracking.racer WHAT TABLES STORE`.

In each of the comma-separated tables it stops where MLflow has looked for rows, found none, and is about to insert the
first. There it prints `held` with the table's name, and continues at a line of input. At the end it prints its result.
"""

import sys

from mlflow.store.model_registry.dbmodels import models as registry_tables
from mlflow.store.tracking.dbmodels import models as tracking_tables
from sqlalchemy import event

from holdfast.components.register import run as register
from holdfast.spec.errors import ChampionChangedError
from holdfast.store import open_store
from holdfast.tracking import RunTracker, promote
from tests.tracking import made

held: set[str] = set()


def hold(what: str) -> None:
    print("held", what, flush=True)
    sys.stdin.readline()


def hold_at(table: str) -> None:
    """Wait for a line of input before the first insertion into a table."""
    rows = getattr(tracking_tables, table, None) or getattr(registry_tables, table)

    def before_insert(*_: object) -> None:
        if table not in held:
            held.add(table)
            hold(table)

    event.listen(rows, "before_insert", before_insert)


if __name__ == "__main__":
    what, tables, url = sys.argv[1:]
    store = open_store(url)
    for table in filter(None, tables.split(",")):
        hold_at(table)
    hold("start")
    if what == "describe":
        print(RunTracker.open(made.spec(), made.RUN_ID, made.DATASET_ID, store).mlflow_run_id, flush=True)
    elif what == "register":
        print(register(made.spec(), made.RUN_ID, store).version, flush=True)
    elif what.endswith((made.RUN_ID, made.OTHER)):  # register that run, or say that it was refused
        spec = made.spec("registration.promote=false") if what.startswith("challenge") else made.spec()
        try:
            print(register(spec, what.split()[-1], store).version, flush=True)
        except ChampionChangedError:
            print("refused", flush=True)
    else:
        print(promote("story", int(what), store).version, flush=True)
