"""Size a cluster on a laptop: the real pipeline and pool with simulated engines and sandboxes."""
