"""No test of the RPC may leave a socket open."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_leaked_sockets():
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    assert not [target for fd, target in left.items() if fd not in before and target.startswith("socket:")]


def _is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")
