"""The users that a one-shot command may run as."""

from __future__ import annotations

import os
import pwd

import msgspec

from prorl_ipc.server import CallError

ONE_USER = "more than one takes Apptainer with sandbox.fakeroot, and a range of users for the node's in /etc/subuid"


class Account(msgspec.Struct, frozen=True):
    """A user of the sandbox, as its image knows it."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def find_account(user: str) -> Account | None:
    """The account of this name or number; None for the daemon's own, which takes no change. Blocks.

    Raises:
        CallError: `no_user`, there is none; `permission`, this process may not become another user.
    """
    try:
        entry = pwd.getpwuid(int(user)) if user.isascii() and user.isdigit() else pwd.getpwnam(user)
    except (KeyError, OverflowError, ValueError) as exc:
        raise CallError("no_user", f"user: the sandbox's image has no user {user!r}") from exc
    if entry.pw_uid == os.geteuid():
        return None
    if os.geteuid() != 0:
        raise CallError("permission", f"user: {user!r} is another one than all processes here have; {ONE_USER}")
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)
