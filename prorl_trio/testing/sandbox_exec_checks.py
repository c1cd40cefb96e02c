"""Promises of a sandbox provider about one-shot programs, their input and user, and files written for them."""

from __future__ import annotations

import hashlib
import random
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.file_calls import EditFile
from prorl_trio.testing.sandbox_check import ACTION_TIMEOUT_S, Contract, checked_sandbox, raises

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.sandbox.sandbox import Sandbox


async def check_files_that_may_not_be_written(contract: Contract) -> None:
    """A file is replaced where a program may open it for writing, and nowhere else: of root on its own machine, all."""
    async with checked_sandbox(contract) as sandbox:
        home = (await sandbox.exec(["sh", "-c", "echo $HOME"], timeout_s=ACTION_TIMEOUT_S)).stdout.decode().strip()
        path = f"{home}/fixed"
        await sandbox.write_file(path, b"old", mode=0o444)
        writable = (await sandbox.exec(["test", "-w", path], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        edit = EditFile(command="str_replace", path=path, old_str="old", new_str="edited")
        assert (await sandbox.edit_file(edit)).ok == writable
        try:
            await sandbox.write_file(path, b"new")
        except PermissionError:
            assert not writable
            assert await sandbox.read_file(path) == b"old"
        else:
            assert writable
            assert await sandbox.read_file(path) == b"new"


async def check_what_exec_leaves(contract: Contract) -> None:
    """Nothing of it runs on, wherever it has gone; what the shell has in its background does."""
    seconds = 10**6 + secrets.randbelow(10**6)  # by which these are told from anybody's
    stay = f"sleep {seconds}1 & setsid sleep {seconds}2 & (setsid -f sleep {seconds}3)"
    leave = f"setsid sleep {seconds}4 & setsid -f env -i sleep {seconds}5; (setsid -f sh -c 'sleep {seconds}6; :' &)"
    async with checked_sandbox(contract) as sandbox:
        await sandbox.bash(stay, timeout_s=ACTION_TIMEOUT_S)
        assert (await sandbox.exec(["sh", "-c", leave], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        listed = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=ACTION_TIMEOUT_S)
        running = [number for number in range(1, 7) if f"sleep {seconds}{number}".encode() in listed.stdout]
        assert running == [1, 2, 3]


async def check_long_input(contract: Contract) -> None:
    """More than a frame holds, bit for bit, to a program that reads it, and to one that does not, or cannot start."""
    content = random.Random(1).randbytes(1024) * 24 * 1024
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.exec(["sha256sum"], timeout_s=ACTION_TIMEOUT_S, stdin=content)
        assert result.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()
        assert (await sandbox.exec(["head", "-c", "3"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).stdout == content[
            :3
        ]
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).exit_code == 0
        assert (await sandbox.exec(["sleep", "7000"], timeout_s=0.2, stdin=content)).timed_out
        missing = sandbox.exec(["/no/such/program"], timeout_s=ACTION_TIMEOUT_S, stdin=content)
        await raises(FileNotFoundError, missing)
        assert (await sandbox.exec(["cat"], timeout_s=ACTION_TIMEOUT_S, stdin=b"short")).stdout == b"short"


async def check_streamed_output(contract: Contract) -> None:
    """All of it arrives, in order, whatever the result keeps; what the receiver raises ends the program."""
    content = random.Random(2).randbytes(1024) * 8 * 1024
    came: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.exec(
            ["cat"],
            timeout_s=ACTION_TIMEOUT_S,
            stdin=content,
            max_output_bytes=1000,
            on_output=lambda stream, data: came[stream].extend(data),
        )
        assert came == {"stdout": content, "stderr": b""}
        assert result.stdout_dropped_bytes >= len(content) - 1000

        def refuse(stream: str, data: bytes) -> None:
            raise ZeroDivisionError(f"{stream}: {len(data)}")

        await raises(ZeroDivisionError, sandbox.exec(["echo", "x"], timeout_s=ACTION_TIMEOUT_S, on_output=refuse))
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0


async def check_programs_that_are_talked_to(contract: Contract) -> None:
    """Each answer comes before the next question; a program ends with its block, its input or its time."""
    async with checked_sandbox(contract) as sandbox:
        async with sandbox.open_program(["cat"], timeout_s=ACTION_TIMEOUT_S) as program:
            for number in range(20):
                await program.send(b"%d\n" % number)
                assert await program.receive_some() == b"%d\n" % number
            await program.send_eof()
            assert await program.receive_some() == b""
            assert (await program.wait()).exit_code == 0
        async with sandbox.open_program(["cat"], timeout_s=ACTION_TIMEOUT_S):
            pass
        async with sandbox.open_program(["sleep", "7000"], timeout_s=0.2) as program:
            assert await program.receive_some() == b""
            assert (await program.wait()).timed_out
        await raises(FileNotFoundError, _end_of(sandbox, "/no/such/program"))
        with trio.fail_after(ACTION_TIMEOUT_S / 2):
            await raises(FileNotFoundError, _feed(sandbox, "/no/such/program"))
            assert await _feed(sandbox, "true") == 0
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0


async def _end_of(sandbox: Sandbox, program: str) -> None:
    async with sandbox.open_program([program], timeout_s=ACTION_TIMEOUT_S) as running:
        await running.wait()


async def _feed(sandbox: Sandbox, program: str) -> int | None:
    async with sandbox.open_program([program], timeout_s=ACTION_TIMEOUT_S) as running:
        with suppress(trio.BrokenResourceError):
            while True:
                await running.send(b"x\n")
        return (await running.wait()).exit_code


async def check_users(contract: Contract) -> None:
    """A program runs as the sandbox's own user by any of its names; another user is refused in words, or is that."""
    async with checked_sandbox(contract) as sandbox:
        who = "id -u; echo $HOME"
        own = (await sandbox.exec(["sh", "-c", who], timeout_s=ACTION_TIMEOUT_S)).stdout
        name = own.split()[0].decode()
        assert (await sandbox.exec(["sh", "-c", who], timeout_s=ACTION_TIMEOUT_S, user=name)).stdout == own
        await raises(ValueError, sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S, user="no-such-user"))
        known = (await sandbox.exec(["cat", "/etc/passwd"], timeout_s=ACTION_TIMEOUT_S)).stdout.decode().split("\n")
        others = [line.split(":")[0] for line in known if line and line.split(":")[2] != name]
        refusal = ""
        try:
            result = await sandbox.exec(["id", "-un"], timeout_s=ACTION_TIMEOUT_S, user=others[0])
        except PermissionError as exc:
            refusal = str(exc)
        assert "sandbox.fakeroot" in refusal if refusal else result.stdout.decode().strip() == others[0]


EXEC_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_files_that_may_not_be_written,
    check_what_exec_leaves,
    check_long_input,
    check_streamed_output,
    check_programs_that_are_talked_to,
    check_users,
)
