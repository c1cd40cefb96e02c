"""Limits on the contents of a sandbox, enforced by the kernel."""
