"""The viewer's static page, for a node, for recorded runs, and as one file."""
