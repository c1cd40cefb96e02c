"""Rollouts of a node for SkyRL: a generator with many segments per rollout, and weights with versions.

`generator` and `trainers` need SkyRL; the other modules do not. See docs/skyrl.md.
"""
