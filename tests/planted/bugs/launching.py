"""What could go wrong with launching, and with telling how it ended."""

from __future__ import annotations

from tests.planted.bug import Bug

_KUBERNETES = "tests/launch/kubernetes/test_classify.py tests/launch/kubernetes/test_launcher.py"

_AGENT = "tests/launch/node/test_agent.py"

_HANGS = "tests/launch/node/test_hangs.py"

BUGS = [
    Bug(
        "components/launch/node/hangs.py",
        "return one.idle >= (patience if alone else soon)",
        "return one.quiet >= (patience if alone else soon)",
        _HANGS,
        "a rank that waits for a core of a loaded machine would be a hang",
    ),
    Bug(
        "components/launch/node/hangs.py",
        "if not all(one.waiting or one.idle",
        "if not others and not all(one.waiting or one.idle",
        _HANGS,
        "a gang of which a rank goes on would be a hang",
    ),
    Bug(
        "components/launch/node/hangs.py",
        'if soon is None or (one.phase == "data" and one.seen.requests):',
        "if soon is None:",
        _HANGS,
        "a slow store would be a hang",
    ),
    Bug(
        "components/runtime/place.py",
        "if not self._first:",
        "if self._q:",
        "tests/runtime/test_place.py",
        "the step that compiles would count as a usual one",
    ),
    Bug(
        "components/train/stragglers.py",
        "self._slow[rank] + 1 if slow else 0",
        "self._slow[rank] + int(slow)",
        "tests/train/test_stragglers.py",
        "a rank that is slow now and then, by chance, would be a straggler",
    ),
    Bug(
        "components/launch/node/agent.py",
        "connection.send(Drain(seconds=given))",
        "return self._kill()",
        _AGENT,
        "what lies complete in memory would go with its ranks",
    ),
    Bug(
        "components/launch/node/agent.py",
        "                self._process = self._start()\n",
        "                return\n",
        _AGENT,
        "the death of the agent would end all saving",
    ),
    Bug(
        "components/launch/node/agent.py",
        "return Connection(end, self._silence)",
        "return Connection(end, None)",
        _AGENT,
        "an agent that stands still would stay for ever",
    ),
    Bug(
        "components/checkpoint/agent/link.py",
        "                for step in sorted(self._open):\n                    connection.send(self._open[step])\n",
        "",
        _AGENT,
        "a save would be lost with the agent that it was given to",
    ),
    Bug(
        "components/checkpoint/agent/service.py",
        "            for step in self._steps:\n                rank.give_up(step)\n",
        "",
        _AGENT,
        "rank 0 would wait long for the part of a dead rank",
    ),
    Bug(
        "components/checkpoint/writer.py",
        "if self._free and not self._lags(step):",
        "if self._free:",
        "tests/checkpoint/test_save_and_load.py",
        "training could run ahead of its newest checkpoint without end",
    ),
    Bug(
        "components/train/engines/torch/engine.py",
        "        before_update()\n",
        "",
        "tests/train/test_engines.py",
        "a state could be saved that is half of one step and half of the next",
    ),
    Bug(
        "components/launch/ending.py",
        "(code >= 128, code in consequences, code)",
        "(code in consequences, code)",
        "tests/launch",
        "among the codes of a gang the permanent one says why",
    ),
    Bug(
        "components/launch/ending.py",
        "return 128 - status if status < 0",
        "return -status if status < 0",
        "tests/launch",
        "a killed rank would look like one that ended for good",
    ),
    Bug(
        "components/launch/supervise.py",
        "if len(recent) >= restarts.budget:",
        "if len(recent) > restarts.budget:",
        "tests/launch/test_supervise.py",
        "one restart more than the budget",
    ),
    Bug(
        "components/launch/supervise.py",
        "> restarts.window_minutes * 60",
        "> restarts.window_minutes * 3600",
        "tests/launch/test_supervise.py",
        "old restarts would count",
    ),
    Bug(
        "components/launch/warm.py",
        "os.setsid()",
        "pass",
        "tests/launch/test_warm.py",
        "a signal to a rank's group would reach others",
    ),
    Bug(
        "components/launch/warm.py",
        "        os.environ.clear()\n",
        "",
        "tests/launch/test_warm.py",
        "variables of the server would reach its processes",
    ),
    Bug(
        "components/launch/kubernetes/owner.py",
        'or found["metadata"]["uid"] != self.uid or',
        "or",
        "tests/launch/kubernetes/test_owner.py",
        "a new workflow of the old name would keep the job of one that is gone",
    ),
    Bug(
        "components/launch/kubernetes/owner.py",
        'spec.get("activeDeadlineSeconds") == 0 or ended',
        "ended",
        "tests/launch/kubernetes",
        "a run that was ended in KFP would go on training",
    ),
    Bug(
        "components/launch/kubernetes/classify.py",
        'if reason == "OOMKilled":',
        "if False:",
        _KUBERNETES,
        "lack of memory has a remedy",
    ),
    Bug(
        "components/launch/kubernetes/classify.py",
        "code in _BAD_NODE_CODES and not disruption",
        "code in _BAD_NODE_CODES",
        _KUBERNETES,
        "a node would be blamed for what the cluster asked",
    ),
    Bug(
        "components/launch/kubernetes/lease.py",
        'if holder in ("", self._me):\n            return True',
        "if True:\n            return True",
        "tests/launch/kubernetes",
        "two launchers would follow one run",
    ),
    Bug(
        "components/launch/slurm.py",
        "if codes[name] == cause)",
        "if codes[name])",
        "tests/launch/test_slurm.py",
        "the log of a rank that only lost its peer would be named",
    ),
    Bug(
        "components/launch/ray/room.py",
        "self._clock() - self._missing_since >= self._patience",
        "self._clock() >= self._patience",
        "tests/launch/ray/test_room.py",
        "a step whose node is lost after an hour would be given up at once",
    ),
    Bug(
        "components/launch/ray/room.py",
        "now if queued or self._missing_since is None",
        "now if self._missing_since is None",
        "tests/launch/ray/test_room.py",
        "shares that wait for their turn would be given up",
    ),
    Bug(
        "components/launch/ray/room.py",
        "if said != self._said or now",
        "if now",
        "tests/launch/ray/test_room.py",
        "nothing would be said of a change for minutes",
    ),
    Bug(
        "components/launch/ray/room.py",
        "    return all(node.get(name, 0) >= value",
        "    return any(node.get(name, 0) >= value",
        "tests/launch/ray/test_room.py tests/pipelines/backends/ray/test_doctor.py",
        "a node without accelerators would be large enough",
    ),
    Bug(
        "pipelines/doctor/ray.py",
        "elif one.word != word:",
        "elif not one.word and not word:",
        "tests/pipelines/backends/ray/test_doctor.py",
        "a folder that every machine has for itself would pass for a shared store",
    ),
]
