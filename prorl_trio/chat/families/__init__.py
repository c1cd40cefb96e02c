"""The model families: the syntax of their tool calls and reasoning, and how to detect them by their template."""
