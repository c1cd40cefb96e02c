"""Fleets on Slurm: the batch script, the programs of its tasks, and the cleanup."""
