"""Rollouts of a node for NeMo Gym: an agent server whose `/run` is a job.

`agent` needs nemo-gym (`pip install 'prorl-trio[nemo-gym]'`); the other modules do not. See docs/nemo-gym.md.
"""
