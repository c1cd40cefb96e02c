"""The viewer's page: static files, for a node, for recorded runs, and as one file."""
