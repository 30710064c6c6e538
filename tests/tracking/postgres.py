"""A PostgreSQL for one test: a fresh cluster in a temporary folder, on a free port of this machine."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

PASSWORD = "hunter2"


@contextmanager
def cluster() -> Iterator[str]:
    """The URI of an empty database for MLflow. Skips where PostgreSQL is not installed."""
    programs_found = [Path(path) for path in filter(None, [shutil.which("initdb")])]
    programs_found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    if not programs_found:
        pytest.skip("PostgreSQL is not installed here (Debian: postgresql)")
    programs = programs_found[0].resolve().parent
    user: dict[str, Any] = {}
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        name = next((account.pw_name for account in pwd.getpwall() if account.pw_name in ("postgres", "nobody")), None)
        if name is None:
            pytest.skip("PostgreSQL does not run as root, and there is neither the user postgres nor nobody")
        user = {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))  # not pytest's folder, which only this user may read
    try:
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, user["user"], user["group"])
        data, port = folder / "data", free_port()

        def run(*arguments: object) -> None:
            result = subprocess.run(
                [str(argument) for argument in arguments],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                check=False, **user,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr

        secrecy = ("--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "--username=holdfast")
        run(programs / "initdb", f"--pgdata={data}", *secrecy, "--encoding=UTF8", "--no-sync")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        waiting = ("--wait", "--timeout=300")
        run(
            programs / "pg_ctl", "start", *waiting, f"--pgdata={data}", f"--log={folder / 'log'}",
            f"--options={options}",
        )  # fmt: skip
        try:
            yield f"postgresql+psycopg://holdfast:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            run(programs / "pg_ctl", "stop", f"--pgdata={data}", "--mode=immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
