"""The Python, the daemon and the files that are bound into each sandbox."""
