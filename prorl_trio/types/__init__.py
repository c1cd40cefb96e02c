"""The domain: jobs, outcomes, trajectories, batches, and the tree of exceptions."""
