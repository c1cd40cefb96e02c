"""Tasks in a shell: an agent works in a sandbox, and the task's own script grades the result."""
