from __future__ import annotations

import subprocess

import msgspec
import trio

from prorl_daemon.processes import kill_until_gone, read_process_table, wait_until_gone


async def test_a_pid_with_another_start_time_is_neither_killed_nor_waited_for():
    with subprocess.Popen(["sleep", "3607"]) as child:
        (entry,) = read_process_table().with_descendants(lambda entry: entry.pid == child.pid)
        other = msgspec.structs.replace(entry, start_ticks=entry.start_ticks - 1)
        choices = [{other}, set()]
        with trio.fail_after(30):
            assert await kill_until_gone(lambda _: choices.pop(0)) == set()
            await wait_until_gone([other])
        assert child.poll() is None
        choices = [{entry}, set()]
        with trio.fail_after(30):
            await kill_until_gone(lambda _: choices.pop(0))
        assert child.wait(5) == -9
