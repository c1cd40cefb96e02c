"""The trainer's session on all nodes of a fleet at once, with the interface of a session on one."""
