"""A fleet by Slurm: the batch script, what its tasks execute, and what keeps anything from being left behind."""
