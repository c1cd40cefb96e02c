"""Size a cluster on a laptop: the real pipeline and pool over simulated engines and sandboxes."""
