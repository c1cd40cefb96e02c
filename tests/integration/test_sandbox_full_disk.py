"""A disk that is really full: commands say so, the shell survives, and deleting makes room."""

from __future__ import annotations

import pytest
import trio

from prorl_ipc.limits import SandboxLimits
from prorl_trio.sandbox.provider import SandboxSpec

MIB = 1024 * 1024
ACTION_TIMEOUT_S = 40
FULL = "No space left on device"


async def check_refusals(sandbox):
    for command in ("echo lost > new", "cp filler second", "mkdir -p a/b/c && head -c 1M /dev/zero > a/b/c/d"):
        failed = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
        assert (failed.exit_code, failed.restarted, failed.breach) == (1, False, "disk"), failed
        assert FULL in failed.output
        assert "remove some files" in failed.breach_text
    cell = await sandbox.ipython("open('/tmp/more', 'w').write('x' * 10**6)", timeout_s=ACTION_TIMEOUT_S)
    assert cell.error is not None
    assert FULL in cell.error.value
    with pytest.raises(OSError, match=FULL):
        await sandbox.write_file("/tmp/file", b"x" * MIB)


async def test_commands_on_a_full_disk(provider):
    with trio.fail_after(120):
        async with provider.open_sandbox(SandboxSpec(limits=SandboxLimits(disk_bytes=48 * MIB))) as sandbox:

            async def bash(command):
                return await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)

            await bash("x=kept; cd /tmp; greet() { echo hello; }")
            filled = await bash("head -c 60M /dev/zero > filler; ls -l filler | wc -l")
            assert filled.breach == "disk"
            if FULL not in filled.output:
                # As root, Apptainer's has no size of its own: the watchdog ends all that write beyond the limit.
                assert provider.name == "apptainer"
                await bash("rm -rf /tmp/filler")
                assert (await bash("echo room > /tmp/new && cat /tmp/new")).output.endswith("room\n")
                assert (await bash("true")).breach == ""
                return
            await check_refusals(sandbox)
            alive = await bash("echo $x; greet; pwd; cat <<EOF\nhere\nEOF\nls | wc -l > /dev/null")
            assert alive.output.startswith("kept\nhello\n/tmp\n"), alive
            assert not alive.restarted
            freed = await bash("rm -rf filler second a new more; echo room > new && cat new")
            assert (freed.output, freed.exit_code, freed.breach, freed.restarted) == ("room\n", 0, "", False)
            after = await bash("echo $x")
            assert (after.output, after.breach) == ("kept\n", "")
            await sandbox.write_file("/tmp/file", b"x" * MIB)
