"""What a sandbox may use: each limit, in each isolating provider, is kept, named in the result, and survived."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tools.builtin import render_bash

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
LIMITS = SandboxLimits(
    memory_bytes=384 * MIB, max_processes=150, max_open_files=1024, max_file_bytes=32 * MIB, disk_bytes=64 * MIB
)
ACTION_TIMEOUT_S = 60
HOG = "python3 -c 'import time; x = bytearray(160 * 2**20); time.sleep(300)'"
# At most some 2,000 processes each: nothing else bounds them where the kernel does not. See test_sandbox_pid_limit.py.
FORKS = "bomb() { if [ $1 = 0 ]; then sleep 300; else bomb $(($1 - 1)) | bomb $(($1 - 1)) & fi; }; bomb 10; sleep 300"
BOMBS = {
    "fork bomb of a shell": (FORKS, "processes"),
    "fork bomb of a program": (
        # It stays when forks are refused, which may be before the watchdog's next look.
        "python3 -c 'import os, time\nfor _ in range(11):\n try: os.fork()\n except OSError: pass\ntime.sleep(300)'",
        "processes",
    ),
    "fork bomb that ignores signals": (f"trap '' INT TERM HUP; {FORKS}", "processes"),
    "memory of many processes": (f"for i in 1 2 3; do {HOG} & done; wait -n", "memory"),
    "a file": ("head -c 64M /dev/zero > /tmp/large", "file_size"),
    "a file of the home directory": ("head -c 64M /dev/zero > ~/large", "file_size"),
}


async def test_bombs_are_ended_named_and_survived(provider):
    with trio.fail_after(300):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            for name, (command, breach) in BOMBS.items():
                result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
                assert result.breach == breach, f"{name}: {result}"
                assert result.breach_text
                assert f"[{result.breach_text}]" in render_bash(result, ACTION_TIMEOUT_S)
                after = await sandbox.bash("rm -rf /tmp/large ~/large; echo alive", timeout_s=ACTION_TIMEOUT_S)
                assert (after.output.strip().splitlines()[-1], after.exit_code) == ("alive", 0), name
                assert after.breach == "", name


async def test_cpu_time(provider):
    with trio.fail_after(200):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(cpu_s=1))) as sandbox:
            busy = await sandbox.bash("python3 -c 'while True: pass'", timeout_s=150)
    assert (busy.breach, busy.exit_code, busy.restarted) == ("cpu", 137, False)
    assert "CPU time" in busy.breach_text


async def test_wall_clock(provider):
    with trio.fail_after(200):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(wall_s=3.0))) as sandbox:
            cells = []

            async def run_cell():
                cells.append(await sandbox.ipython("import time; time.sleep(300)", timeout_s=ACTION_TIMEOUT_S))

            async with trio.open_nursery() as nursery:  # they wait side by side
                nursery.start_soon(run_cell)
                idle = await sandbox.bash("sleep 300", timeout_s=ACTION_TIMEOUT_S)
            short = await sandbox.bash("sleep 300", timeout_s=0.5)
    (cell,) = cells
    assert (idle.breach, idle.timed_out) == ("wall", True)
    assert (cell.breach, cell.timed_out) == ("wall", True)
    assert (short.breach, short.timed_out) == ("", True)


async def test_one_process_is_refused_more_and_says_so(provider):
    refused = {
        "x = bytearray(600 * 2**20)": ("memory", "MemoryError"),
        "open('/tmp/large', 'wb').write(bytes(64 * 2**20))": ("file_size", "OSError"),
        "import os; files = [os.open('/', 0) for _ in range(2000)]": ("", "OSError"),
    }
    with trio.fail_after(200):
        async with provider.open_sandbox(SandboxSpec(limits=LIMITS)) as sandbox:
            for code, (breach, error) in refused.items():
                cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
                assert (cell.breach, cell.error and cell.error.name, cell.restarted) == (breach, error, False), code
            with pytest.raises(ValueError, match="File too large"):
                await sandbox.write_file("/tmp/large", bytes(40 * MIB))
            program = await sandbox.exec(["head", "-c", "64M", "/dev/zero"], timeout_s=ACTION_TIMEOUT_S)
    assert (program.exit_code, program.breach) == (0, "")


async def test_400_threads_may_sleep_and_a_kernel_without_memory_says_so(provider):
    sleep = "for _ in range(400): threading.Thread(target=time.sleep, args=(999,), daemon=True).start()"
    large_stacks = "import threading, time; threading.stack_size(8 * 2**20); kept = []"
    # What the last stack did not fit into is enough to go on with.
    the_rest = "while True: kept.append(bytes(1000))"
    with trio.fail_after(200):
        async with provider.open_sandbox(SandboxSpec()) as sandbox:
            cell = await sandbox.ipython(f"import threading, time\n{sleep}", timeout_s=ACTION_TIMEOUT_S)
            assert (cell.error, cell.breach) == (None, "")
            counted = await sandbox.ipython("threading.active_count()", timeout_s=ACTION_TIMEOUT_S)
            assert (counted.result, counted.restarted) == ("401", False)
            await sandbox.restart_ipython()
            cells = [
                await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
                for code in (large_stacks, sleep, the_rest, "1", "1", "1")
            ]
    lost = next(cell for cell in cells if cell.restarted)
    # In a cell it is that cell's error; between two, the next one has been done by another kernel, and names it.
    assert (lost.error and lost.error.name, lost.breach) in (("MemoryError", "memory"), (None, "memory"))
    assert cells[-1].result == "1"
