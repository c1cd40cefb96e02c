"""A node, its sandboxes, its backend and its trainer as processes of their own, killed at random while they work.

Nothing that was accepted may be lost, nothing come twice, nothing be left: the trainer keeps a journal of what it took,
and `leftovers` looks at the machine.
"""

from support.soak.daemons import SandboxDaemons
from support.soak.journal import Entry, Journal
from support.soak.kept_process import KeptProcess, Victim, kill_at_random, rig_environment
from support.soak.leftovers import Leftovers, adopted_orphans
from support.soak.world import SoakWorld, open_world

__all__ = [
    "Entry",
    "Journal",
    "KeptProcess",
    "Leftovers",
    "SandboxDaemons",
    "SoakWorld",
    "Victim",
    "adopted_orphans",
    "kill_at_random",
    "open_world",
    "rig_environment",
]
