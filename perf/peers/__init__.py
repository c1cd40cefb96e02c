"""Peers: other people's tools, each in an environment of its own, measured beside ours in the same run.

`python -m perf.peers setup` makes the environments; a benchmark leaves out the peer that has none and says why.
"""
