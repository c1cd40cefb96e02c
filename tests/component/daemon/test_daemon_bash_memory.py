"""However much a command writes, the daemon stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from prorl_ipc.sandbox_calls import BashResult, BashRun

OUTPUT_BYTES = 100_000_000
MAX_GROWTH_KIB = 16 * 1024


def peak_kib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("text", ["some line of output", "\\r 10% of it"])
async def test_100_mb_of_output_pass_through_little_memory(start_daemon, text):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as client:

        async def run(command):
            with trio.fail_after(120):
                return await client.call(BashRun(command=command, timeout_s=100), BashResult, timeout_s=110)

        await run("seq 1 100000")
        before_kib = peak_kib(daemon.process.pid)
        size = OUTPUT_BYTES if "line" in text else OUTPUT_BYTES // 20
        result = await run(f"echo first; yes \"$(printf '{text}')\" | head -c {size}; echo; echo last")
        assert result.exit_code == 0
        assert result.output.startswith("first\n")
        assert result.output.endswith("\nlast\n")
        if "line" in text:
            assert OUTPUT_BYTES - 64 * 1024 <= result.dropped_bytes <= OUTPUT_BYTES
        grown_kib = peak_kib(daemon.process.pid) - before_kib
        assert grown_kib < MAX_GROWTH_KIB, f"{grown_kib} KiB more"
