"""The folder in which the nodes of a fleet find each other's trainers: one file per node, renewed by its heartbeat."""
