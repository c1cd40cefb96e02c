"""Peers: tools of other projects, in separate environments, measured in the same run as ours.

`python -m perf.peers setup` makes the environments. A benchmark skips a peer without one, and reports the reason.
"""
