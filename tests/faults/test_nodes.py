"""A wait in a test notices its condition, however late the test checks."""

from pathlib import Path

from tests.faults.nodes import Held
from tests.train.tiny_run import new_store


def test_an_event_during_the_end_of_the_last_process_is_seen(tmp_path: Path) -> None:
    looks: list[int] = []

    def there() -> bool:
        looks.append(1)
        return len(looks) > 1  # it appeared just after the first check, and the end with it

    Held(new_store(tmp_path / "store"), "run", tmp_path / "holds", lambda: not looks).wait(there, "the last step")
    assert len(looks) == 2
