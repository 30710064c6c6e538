"""`python -m tests.cluster.drill --minutes 20` on an emulated cluster. With `--namespace NAME --spec SPEC` in a
namespace of a real one. Exits with 1 at the first difference.

First the training runs undisturbed. Then the same training runs repeatedly under faults until the time is over. Each
fault happens once, `--together` of them in a training; then several happen at random. After each run the digest of its
last state must be that of the first. The objects of the namespace must be those of before.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.drill.place import DrillError, Place

TRIES = 3  # consecutive trainings that may end before their faults
LIMIT_SECONDS = 3600.0  # for one training
SETTLE_SECONDS = 180.0  # until the objects of a run must be gone
RETRYABLE = 128  # exit codes from here on


class Drill:
    """Runs trainings at a place and compares their digests. `seconds` is how long the undisturbed one trained."""

    def __init__(self, place: Place, seed: int, say: object = print) -> None:
        self._place, self._random, self._say = place, random.Random(seed), say
        self._prefix = f"drill-{seed}"
        self._before = place.listed()
        self._seconds = 0.0
        self._digest = ""
        self.done = 0

    def run(self, minutes: float, only: Sequence[str] = (), together: int = 1) -> None:
        """Run the undisturbed training and then the disturbed ones, the first with `together` faults each. Raises
        DrillError."""
        end = time.monotonic() + minutes * 60
        names = [name for name in self._place.faults if not only or name in only]
        self._tell(f"before: {len(self._before)} objects; faults: {', '.join(names)}")
        self._digest, _ = self._train("calm", [])
        self._tell(f"calm: state {self._digest}, {self._seconds:.1f} s of training")
        turn = list(names)
        while turn or time.monotonic() < end:
            faults, turn = turn[:together] or self._random.choices(names, k=self._random.randint(1, 3)), turn[together:]
            self.done += 1
            self._disturb(faults)
            self._tell(f"{self.done}: {', '.join(faults)}: the same state, nothing left")

    def _disturb(self, faults: list[str]) -> None:
        """Train through all of `faults`. The speed of a shared machine varies, so faults that came too late for one
        training go to the next one. They are timed by the speed of the last one."""
        missed = faults
        for turn in range(TRIES):
            digest, missed = self._train(f"{self.done}{'-again' * turn}", missed)
            if digest != self._digest:
                raise DrillError(f"after {', '.join(faults)} the state is {digest}, undisturbed it is {self._digest}")
            if not missed:
                return
            self._tell(f"  over in {self._seconds:.1f} s, before {', '.join(missed)}: once more")
        raise DrillError(f"run {self.done} was over before {', '.join(missed)}, {TRIES} times: give it more steps")

    def _train(self, name: str, faults: Sequence[str]) -> tuple[str, list[str]]:
        """One training to its end, with each of `faults` at a different moment. Returns the digest of its state, and
        the faults that came after its end."""
        place, salt, waiting, limit = (
            self._place,
            f"{self._prefix}-{name}",
            list(faults),
            time.monotonic() + LIMIT_SECONDS,
        )
        place.launch(salt)
        start: float | None = None
        first = moment = 0.0
        while True:
            if time.monotonic() > limit:
                raise DrillError(f"run {name} has not ended after {LIMIT_SECONDS:.0f} s")
            result = place.ended()
            if result is not None:
                if result.code == 0:
                    break
                if result.code < RETRYABLE:
                    raise DrillError(f"run {name} ended permanently with {result.code}: {result.last_lines}")
                self._tell(f"  the launcher ended with {result.code}: it is started again")
                place.launch(salt)
            if place.training() and start is None:
                first = start = time.monotonic()
                moment = self._moment(len(faults))
            if waiting and start is not None and time.monotonic() - start >= moment:
                hit = place.faults[waiting[0]]()
                if hit:
                    self._tell(f"  {waiting[0]}: {hit}")
                    waiting.pop(0)
                    start, moment = time.monotonic(), self._moment(len(faults))
            time.sleep(0.05)
        if start is not None and (waiting or not faults):
            self._seconds = time.monotonic() - first
        digest = place.digest()
        self._check_nothing_left(name)
        return digest, waiting

    def _moment(self, faults: int) -> float:
        """Seconds from the start of ranks, or from the previous fault, to the next of `faults` faults. Most come
        while the ranks train, some while they start."""
        return self._random.uniform(0.0, 0.6) * self._seconds / max(faults, 1)

    def _check_nothing_left(self, name: str) -> None:
        end = time.monotonic() + SETTLE_SECONDS
        while (objects := self._place.listed()) != self._before:
            if time.monotonic() > end:
                more, fewer = sorted(objects - self._before), sorted(self._before - objects)
                raise DrillError(f"after run {name} there is left: {more or 'nothing'}; missing: {fewer or 'nothing'}")
            time.sleep(0.2)

    def _tell(self, words: str) -> None:
        self._say(words, flush=True)  # type: ignore[operator]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="how long to continue; each fault is tried once first"
    )
    parser.add_argument("--seed", type=int, help="of what is killed when; printed when it is not given")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--together", type=int, default=1, help="how many of them happen in one training at first")
    real = parser.add_argument_group("in a real namespace")
    real.add_argument("--namespace", help="of the launcher; the jobs are made where cluster.namespace says")
    real.add_argument("--kubeconfig", type=Path, help="default: as kubectl finds it")
    real.add_argument("--spec", type=Path, help="a spec whose store is an S3, and whose training lasts minutes")
    real.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    real.add_argument("--image", help="of the launcher (default: that of the spec's steps)")
    real.add_argument("--account", default="holdfast-launcher", help="service account of the launcher")
    victims = "more pods to kill, such as operator=kubeflow/control-plane=kubeflow-training-operator or s3=..."
    real.add_argument("--victim", action="append", default=[], metavar="NAME=NAMESPACE/LABEL=VALUE", help=victims)
    commands = "a fault that a command of this machine makes, such as 'api server=systemctl restart kube-apiserver'"
    real.add_argument("--command", action="append", default=[], metavar="NAME=COMMAND", help=commands)
    real.add_argument("--nodes", action="store_true", help="also cordon the nodes of ranks and delete what runs there")
    real.add_argument("--delete-nodes", action="store_true", help="delete their Node objects as well")
    arguments = parser.parse_args(argv)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to S3
    try:
        if arguments.namespace is None:
            from tests.cluster.drill.emulated import EmulatedPlace

            with tempfile.TemporaryDirectory(prefix="drill-") as folder, EmulatedPlace(Path(folder)) as place:
                drill = Drill(place, seed)
                drill.run(arguments.minutes, arguments.fault, arguments.together)
        else:
            if arguments.spec is None:
                parser.error("--namespace needs --spec")
            if arguments.kubeconfig is not None:
                os.environ["KUBECONFIG"] = str(arguments.kubeconfig)  # read when the package is imported
            from tests.cluster.drill.namespace import NamespacePlace

            with NamespacePlace(arguments) as namespace:
                drill = Drill(namespace, seed)
                drill.run(arguments.minutes, arguments.fault, arguments.together)
    except DrillError as error:
        print(f"DIFFERENCE (seed {seed}): {error}", flush=True)
        return 1
    print(f"{drill.done} disturbed runs, each the same to the last bit; seed {seed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
