"""The node: one process with its nursery tree, its parts, reload and drain."""
