"""How stale a trajectory is: integers by their difference, other names by the order in which they came."""

from __future__ import annotations

import pytest

from prorl_trio.inference.pool.versions import ANNOUNCED_KEPT, MAX_VERSIONS_KEPT, VersionOrder


@pytest.mark.parametrize(
    ("older", "newer", "updates"),
    [
        ("3", "3", 0),
        ("3", "9", 6),
        ("9", "3", 0),
        ("9", "10", 1),
        ("10", "9", 0),
        ("0", "a", 1),
        ("a", "c", 2),
        ("c", "a", 0),
        ("b", "b", 0),
    ],
)
def test_updates_between_two_versions(older, newer, updates):
    order = VersionOrder("0")
    for version in "abc":
        order.note(version)
    assert order.updates(older, newer) == updates


def test_a_version_that_only_an_engine_knew_is_as_far_away_as_it_can_be():
    order = VersionOrder("0")
    order.note("a")
    assert order.updates("older", "a") == 2
    assert order.updates("a", "newer") == 1
    assert order.updates("strange", "strange") == 0


def test_one_that_comes_back_keeps_its_place():
    order = VersionOrder("0")
    for version in ("a", "b", "a"):
        order.note(version)
    assert order.updates("a", "b") == 1


def test_what_was_announced_is_told_in_the_order_in_which_it_was_so_last():
    order = VersionOrder("0")
    for version in ("a", "b", "a"):
        order.announce(version)
    assert order.announced() == ["b", "a"]
    assert order.current == "a"
    for n in range(2 * ANNOUNCED_KEPT):
        order.announce(str(n))
    assert order.announced() == [str(n) for n in range(ANNOUNCED_KEPT, 2 * ANNOUNCED_KEPT)]


def test_the_oldest_are_forgotten():
    order = VersionOrder("first")
    for n in range(MAX_VERSIONS_KEPT):
        order.note(f"v{n}")
    assert order.updates("first", f"v{MAX_VERSIONS_KEPT - 1}") == MAX_VERSIONS_KEPT + 1
    assert order.updates("v0", f"v{MAX_VERSIONS_KEPT - 1}") == MAX_VERSIONS_KEPT - 1
