"""Sandboxes: the provider ABC, its implementations, and the client of the daemon inside."""
