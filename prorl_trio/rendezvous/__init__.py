"""The folder in which the nodes of a fleet find each other's trainers: one file a node, kept fresh by its heartbeat."""
