"""The findings of measurements: which rank is reported, for what, and which is not."""

import random
from collections.abc import Sequence

import pytest

from holdfast.health import Finding, Link, Measured, Report, judge
from holdfast.health.examine import require_health
from holdfast.health.verdict import FATAL, Limit, outliers
from holdfast.spec.errors import LostPeerError, UnhealthyNodeError, WrongArithmeticError


def rank(number: int, node: str = "", device: str = "board", **more: object) -> Measured:
    values = {"rank": number, "node": node or f"node-{number}", "device": device, "kind": "cuda", **more}
    return Measured.model_validate(values)


def summarize(findings: Sequence[Finding]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(finding.severity, finding.probe, finding.ranks) for finding in findings]


def computing(*rates: float, device: str = "board") -> list[Measured]:
    return [rank(number, device=device, rates={"compute": rate}) for number, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([100.0, 99, 98, 100], []),
        ([100.0, 99, 50, 100], [("failed", "compute", (2,))]),
        ([100.0, 99, 85, 100], [("warned", "compute", (2,))]),
        ([100.0, 10], [("failed", "compute", (1,))]),
        ([10.0], []),
        ([0.0, 0.0], []),
        ([100.0, 40, 100, 30, 100], [("failed", "compute", (1,)), ("failed", "compute", (3,))]),
        ([100.0, 70, 50, 130, 160, 80], []),  # the values vary so much that none stands out
    ],
)
def test_a_rank_that_is_far_below_its_peers_is_reported(rates: list[float], expected: list[object]) -> None:
    assert summarize(judge(computing(*rates))) == expected


def test_findings_do_not_depend_on_the_order_of_the_measurements() -> None:
    measured = [
        *computing(100, 40, 99, 98),
        rank(4, right=False),
        rank(5, rates={"compute": 98.0}, versions={"a": "1"}),
    ]
    measured.append(rank(6, versions={"a": "2"}))
    shuffled = random.Random(7).sample(measured, len(measured))
    assert judge(measured) == judge(shuffled)


def test_other_boards_are_no_peers() -> None:
    slower = [report.model_copy(update={"rank": report.rank + 2}) for report in computing(10, 10, device="other")]
    assert judge([*computing(100, 100), *slower]) == ()


def test_a_board_that_is_known_is_compared_with_what_it_usually_reaches() -> None:
    usual = 989.4e12 * 0.65
    for share, severity in ((1.0, []), (0.7, ["warned"]), (0.4, ["failed"])):
        findings = judge(computing(usual * share, usual * share, device="NVIDIA H100 80GB HBM3"))
        assert [finding.severity for finding in findings] == severity * 2


def test_bits_that_differ_name_the_minority_and_of_two_the_one_whose_exact_product_is_wrong() -> None:
    three = [rank(number, bits="same", alike="here") for number in range(2)] + [rank(2, bits="odd", alike="here")]
    assert summarize(judge(three)) == [("failed", "arithmetic", (2,))]
    two = [rank(0, bits="one", alike="here"), rank(1, bits="other", alike="here")]
    assert summarize(judge(two)) == [("failed", "arithmetic", (0,)), ("failed", "arithmetic", (1,))]
    assert [finding.sure for finding in (*judge(three), *judge(two))] == [True, False, False]
    checked = [two[0], two[1].model_copy(update={"right": False})]
    assert summarize(judge(checked)) == [("failed", "arithmetic", (1,))]
    elsewhere = [two[0], two[1].model_copy(update={"alike": "other libraries"})]
    assert judge(elsewhere) == ()


def links(rates: dict[tuple[int, int], float]) -> list[Link]:
    return [Link(first=first, second=second, rate=rate) for (first, second), rate in rates.items()]


def test_a_rank_is_judged_by_its_best_link_so_that_a_slow_peer_does_not_make_others_slow() -> None:
    ranks = [rank(number) for number in range(3)]
    findings = judge(ranks, links({(0, 1): 100, (0, 2): 10, (1, 2): 10}))
    assert summarize(findings) == [("failed", "link", (2,))]


def test_one_slow_link_names_both_its_ends_and_fails_neither() -> None:
    ranks = [rank(number) for number in range(4)]
    pairs = {(first, second): 100.0 for first in range(4) for second in range(first + 1, 4)}
    assert summarize(judge(ranks, links(pairs | {(1, 3): 10}))) == [("warned", "link", (1, 3))]


def test_links_within_a_node_are_not_compared_with_those_between_nodes() -> None:
    ranks = [rank(number, node=f"node-{number // 2}") for number in range(4)]
    pairs = {(0, 1): 1000.0, (2, 3): 1000.0, (0, 2): 10.0, (0, 3): 10.0, (1, 2): 10.0, (1, 3): 10.0}
    assert judge(ranks, links(pairs)) == ()


def test_a_clock_offset_counts_only_beyond_its_error() -> None:
    for ahead, error, expected in (
        (0.5, 1.0, []), (2.5, 1.0, ["warned"]), (-2.5, 1.0, ["warned"]), (2.5, 2.0, []), (-90.0, 1.0, ["warned"]),
    ):  # fmt: skip
        findings = judge([rank(0, clock_ahead=ahead, clock_error=error)])
        assert [finding.severity for finding in findings] == expected
    assert "at least 89.0 s behind the store's" in findings[0].words


def test_a_clock_fails_a_node_only_against_several_peers_and_else_warns() -> None:
    def with_clocks(*ahead: float) -> list[str]:
        ranks = [rank(number, clock_ahead=seconds, clock_error=1.0) for number, seconds in enumerate(ahead)]
        return [finding.severity for finding in judge(ranks)]

    assert with_clocks(75.0, 75.5, 74.0) == ["warned"] * 3
    assert with_clocks(0.0, 75.0) == ["warned"]
    assert with_clocks(0.0, 75.0, 0.5) == ["failed"]


def test_links_are_compared_with_those_of_the_same_device() -> None:
    devices = ["H100", "H100", "H100", "L40S", "L40S"]
    ranks = [rank(number, device=device, kind="cuda") for number, device in enumerate(devices)]
    pairs = {
        (first, second): 300.0 if second < 3 else 20.0 for first in range(5) for second in range(first + 1, 5)
    }  # fmt: skip
    assert judge(ranks, links(pairs)) == ()


def test_a_disk_that_takes_nothing_fails_its_node_also_where_it_is_alone() -> None:
    assert summarize(judge([rank(0, rates={"disk": 0.0})])) == [("failed", "disk", (0,))]
    peers = [rank(1, rates={"disk": 1e9}), rank(2, rates={"disk": 1e9})]
    assert summarize(judge([rank(0, rates={"disk": 0.0}), *peers])) == [("failed", "disk", (0,))]  # reported once


def test_fault_counters_fail_a_device_and_early_signs_warn() -> None:
    assert summarize(judge([rank(0, counters={"xid 79": 1, "corrected ECC errors": 7})])) == [
        ("failed", "counters", (0,))
    ]
    assert summarize(judge([rank(0, counters={"pending row remaps": 1})])) == [("warned", "counters", (0,))]
    assert judge([rank(0, counters=dict.fromkeys(FATAL, 0))]) == ()


def test_nodes_with_a_rarer_version_get_a_warning() -> None:
    ranks = [rank(number, versions={"driver": "2" if number == 1 else "1"}) for number in range(3)]
    findings = judge([*ranks, rank(3)])  # not the first rank of its node
    assert summarize(findings) == [("warned", "versions", (1,))]
    assert findings[0].words == "rank 1 on node-1: versions: driver is 2, and 1 elsewhere"


def test_an_outlier_must_exceed_both_the_share_and_the_spread_of_its_peers() -> None:
    limit = Limit(0.9, 0.5)
    assert [rank for rank, *_ in outliers({0: 100, 1: 100, 2: 100, 3: 40}, limit)] == [3]
    assert [rank for rank, *_ in outliers({0: 100, 1: 70, 2: 130, 3: 40}, limit)] == []


def test_unhealthy_suspect_and_healthy_ranks_end_with_different_errors() -> None:
    three = [rank(number, bits="same", alike="here") for number in range(2)] + [rank(2, bits="odd", alike="here")]
    two = [rank(0, bits="one", alike="here"), rank(1, bits="other", alike="here"), rank(2)]
    for ranks, endings in (
        (three, [LostPeerError, LostPeerError, UnhealthyNodeError]),
        (two, [WrongArithmeticError, WrongArithmeticError, LostPeerError]),
    ):
        report = Report(began=0.0, seconds=1.0, measured=tuple(ranks), findings=judge(ranks))
        for number, ending in enumerate(endings):
            with pytest.raises(ending, match="the bits of a fixed product differ"):
                require_health(report, number)
    require_health(Report(began=0.0, seconds=1.0, measured=(rank(0),)), 0)
