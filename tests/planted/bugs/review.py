"""What a stern reading found, planted again."""

from __future__ import annotations

from tests.planted.bug import Bug

_WATCHDOG = "tests/launch/node/test_watchdog.py"
_HANGS = "tests/launch/node/test_hangs.py"
_REWIND = "tests/pipelines/test_fork.py::test_what_the_state_does_not_allow_is_refused_before_anything_is_written"
_MONITORING = "tests/manifests/test_monitoring.py"
_PLAN = "tests/planning/test_command.py"

BUGS = [
    Bug(
        "holdfast/launch/node/watchdog.py",
        "                    self._end(verdict, ranks)\n",
        "                    self._end(verdict, ranks)\n                    return\n",
        f"{_WATCHDOG}::test_a_gang_that_goes_on_in_place_after_a_hang_is_watched_like_the_first",
        "review: after the first hang of a node nothing would be watched any more",
    ),
    Bug(
        "holdfast/launch/node/watchdog.py",
        '            self._words = ""  # a hang before it is over: the gang goes on in place\n',
        "",
        f"{_WATCHDOG}::test_a_gang_that_goes_on_in_place_after_a_hang_is_watched_like_the_first",
        "review: an attempt after a hang would be said to have ended by it",
    ),
    Bug(
        "holdfast/launch/node/watchdog.py",
        "                board.exchange([], 0.0)",
        "                pass",
        f"{_WATCHDOG}::test_the_ranks_of_a_node_that_have_ended_are_not_missed_by_the_others",
        "review: a node whose ranks have ended would be taken for a silent one",
    ),
    Bug(
        "holdfast/launch/node/threads.py",
        "                if not WORKING.isdisjoint(states_of(child)) or has_working_child(child):",
        "                if not WORKING.isdisjoint(states_of(child)):",
        f"{_WATCHDOG}::test_a_rank_whose_compiler_works_for_it_does_not_sleep",
        "review: a rank that waits for its compiler would be said to hang",
    ),
    Bug(
        "holdfast/launch/node/hangs.py",
        "max(soon or 0.0, UNHEARD) if one.unheard else soon or STOPPED_OUTSIDE",
        "soon or STOPPED_OUTSIDE",
        _HANGS,
        "review: a node that cannot tell for a while would be said to hang",
    ),
    Bug(
        "holdfast/launch/node/hangs.py",
        "    if any(one.unheard for one in suspects) and any(one.quiet < enough for one in others):",
        "    if not suspects:",
        _HANGS,
        "review: a silent node would be said to hang though the gang goes on",
    ),
    Bug(
        "holdfast/planning/search.py",
        "    if _halves(task, layout, micro_batches):",
        "    if layout.pipeline:",
        f"{_PLAN}::test_every_zero_bubble_layout_that_is_proposed_has_a_schedule_that_the_rules_accept",
        "review: a schedule that the rules refuse would be proposed",
    ),
    Bug(
        "holdfast/planning/fields.py",
        '"never" if layout.keeps_gathered else "always"',
        '"always"',
        f"{_PLAN}::test_every_zero_bubble_layout_that_is_proposed_has_a_schedule_that_the_rules_accept",
        "review: a zero-bubble layout would be written without parallel.reshard",
    ),
    Bug(
        "holdfast/planning/memory.py",
        "at_once = layers if layout.keeps_gathered else 3",
        "at_once = 3",
        f"{_PLAN}::test_what_halves_of_a_backward_pass_keep_is_written_counted_and_not_gathered_twice",
        "review: weights that stay gathered would not be counted",
    ),
    Bug(
        "holdfast/scoring/tasks.py",
        "        if _digest_of(written()) != wanted.digest:",
        "        if not _digest_of(written()):",
        "tests/scoring/test_tasks.py::test_data_that_change_between_looking_and_fetching_are_refused",
        "review: a task would be scored on other data than those that the verdict names",
    ),
    Bug(
        "holdfast/scoring/tasks.py",
        "CHUNK_BYTES = 4 * 2**20",
        "CHUNK_BYTES = 2**40",
        "tests/scoring/test_tasks.py",
        "review: data of a task would be read whole into memory",
    ),
    Bug(
        "holdfast/telemetry/metrics.py",
        "            server.shutdown()\n            server.server_close()\n            thread.join()\n",
        "            thread.join(0.0)\n",
        "tests/telemetry/test_metrics.py::test_the_port_is_given_back_at_the_end_and_nothing_is_heard_any_more",
        "review: the port of the figures would stay taken",
    ),
    Bug(
        "holdfast/telemetry/serving.py",
        "            ends.callback(add_listener(shown.take))",
        "            add_listener(shown.take)",
        "tests/telemetry/test_metrics.py::test_the_port_is_given_back_at_the_end_and_nothing_is_heard_any_more",
        "review: figures would be kept of events after the end",
    ),
    Bug(
        "holdfast/launch/emitters/pod.py",
        '"any" if changes_members(job.cluster) else "first"',
        '"any"',
        _MONITORING,
        "review: Prometheus would ask every pod of a job",
    ),
    Bug(
        "holdfast/pipelines/backends/request.py",
        "    problems += check_collector_address(spec)\n",
        "",
        _MONITORING,
        "review: figures would be served where nobody reaches them",
    ),
    Bug(
        "holdfast/pipelines/view/profiles.py",
        "                ended = True",
        "                ended = event.time >= begun",
        "tests/pipelines/view/test_profiles.py::test_a_run_that_ended_before_it_was_asked_is_not_waited_for",
        "review: a profile of a run that has ended would be waited for",
    ),
    Bug(
        "holdfast/pipelines/fork.py",
        '    "data.kind": (',
        '    "data.shuffle": (',
        _REWIND,
        "review: a forked run would go on with another kind of data",
    ),
    Bug(
        "holdfast/pipelines/fork.py",
        '    "training.lora": (',
        '    "data.shuffle": (',
        _REWIND,
        "review: a forked run would look for adapters that its checkpoint has not",
    ),
    Bug(
        "holdfast/pipelines/fork.py",
        '    if spec.data.tokenizer.kind == "bpe" and not problems:',
        "    if not spec:",
        _REWIND,
        "review: a forked run would read its weights with another tokenizer",
    ),
]
