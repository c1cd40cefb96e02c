"""Agent handlers: what a task is, how it is worked on, how it is scored."""
