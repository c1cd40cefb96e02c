"""Rollouts of a node for verl: an agent loop for both verl trainers, and weights with versions that both sides know.

`agent_loop` and `trainers` need verl (`pip install 'prorl-trio[verl]'`); the other modules do not. See
docs/train-with-verl.md.
"""
