"""When the head of a fleet gives up a node that it has no connection to."""

from __future__ import annotations

import msgspec
import pytest

from prorl_trio.fleet.members import _loss
from prorl_trio.rendezvous.watch import FoundNode
from support.fake_fleet import entry_of

ENTRY = entry_of("n1", "ws://h:1")
LATER = msgspec.structs.replace(ENTRY.process, start_time=ENTRY.process.start_time + 1)


@pytest.mark.parametrize(
    ("changes", "life", "why"),
    [
        ({}, "live", ""),
        ({}, "ended", "its process has ended"),
        ({}, "stale", "no heartbeat for 7 s"),
        ({"process": LATER}, "live", "it was started again"),
        ({"url": "ws://h:2"}, "live", "it was started again"),  # the process is the same one, say, as seen from here
        (None, "live", "it has left the fleet"),
    ],
)
def test_the_entry_says_whether_it_is_still_the_node_that_it_was(changes, life, why):
    found = None
    if changes is not None:
        found = FoundNode(entry=msgspec.structs.replace(ENTRY, **changes), life=life, age_s=7.0)
    assert _loss(ENTRY, found) == why
