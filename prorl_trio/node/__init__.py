"""The node: one process with its nurseries and parts, reload and drain."""
