"""The engines of a fleet, dealt to its nodes: that of the own machine first, the others evenly, none unused."""

from __future__ import annotations

from collections import Counter

import pytest

from prorl_launch.slurm.commands import engines_of_node

NODES = ["n1", "n2", "n3", "n4"]


def dealt(engines, nodes=NODES):
    return [engines_of_node(engines, nodes, node) for node in nodes]


def test_each_node_takes_that_of_its_own_machine():
    assert dealt(NODES) == [["n1"], ["n2"], ["n3"], ["n4"]]


def test_the_others_go_to_those_who_have_fewest():
    assert dealt(["n2", "g1", "g2", "g3", "g4"]) == [["g1", "g4"], ["n2"], ["g2"], ["g3"]]


def test_nodes_without_one_share():
    assert dealt(["g1", "g2"]) == [["g1"], ["g2"], ["g1"], ["g2"]]
    assert dealt(["n4"]) == [["n4"]] * 4


def test_without_engines_there_is_none():
    assert dealt([]) == [[]] * 4


@pytest.mark.parametrize("count", range(1, 13))
@pytest.mark.parametrize("own", [0, 1, 3])
def test_all_are_used_and_none_much_more_than_another(count, own):
    engines = [*NODES[:own], *(f"g{number}" for number in range(count))]
    uses = Counter(engine for share in dealt(engines) for engine in share)
    assert set(uses) == set(engines)
    sizes = sorted(map(len, dealt(engines)))
    assert sizes[-1] - sizes[0] <= 1
    if len(engines) >= len(NODES):
        assert set(uses.values()) == {1}
