"""Files below /proc that no sandbox may write, or see, whoever starts it: a launcher or the fork server."""

from __future__ import annotations

__all__ = ["HIDDEN_PROC", "READ_ONLY_PROC"]

READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi")
"""Files that the kernel lets user 0 of the machine write, some at least, whatever its namespace or capabilities."""
HIDDEN_PROC = ("keys", "key-users")
"""Files to be seen empty: the kernel's keyrings are of a user, in whatever namespace."""
