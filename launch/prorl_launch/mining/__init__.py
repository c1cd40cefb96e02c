"""Software engineering tasks, mined from the releases of a package index."""
