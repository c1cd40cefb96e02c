"""Agent handlers: the definition of a task, the agent's work on it, and its score."""
