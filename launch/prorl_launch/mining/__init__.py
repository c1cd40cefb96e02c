"""Tasks of software engineering that are mined out of the releases of a package index."""
