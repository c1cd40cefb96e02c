"""Rollouts of a node for verl: an agent loop for both of its trainers, and weights that both sides know the version of.

`agent_loop` and `trainers` need verl (`pip install 'prorl-trio[verl]'`), the rest does not. See
docs/train-with-verl.md.
"""
