"""Metrics, loop stalls, logs and traces of a node."""
