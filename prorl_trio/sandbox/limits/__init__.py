"""Limits of what runs in a sandbox, kept by the kernel."""
