"""The model families: how each writes tool calls and reasoning, and how it is told from its template."""
