"""How the daemon starts, and how it ends: nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import trio

from prorl_ipc.channel import connect_unix
from prorl_ipc.errors import ChannelBroken, HandshakeRefused
from prorl_ipc.sandbox_calls import BashResult, BashRun, CellResult, IpythonRun, Ping, Pong
from support.skips import because

ESCAPING = """
sleep 1000 &
setsid sleep 1001 &
(setsid setsid sleep 1002 > /dev/null 2>&1 &)
nohup sh -c 'trap "" TERM HUP INT; sleep 1003' > /dev/null 2>&1 &
(exec python3 -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(1000)
    os._exit(0)
')
sleep 0
"""


async def start_everything(sandbox):
    """Leave processes behind that do all they can to live on."""
    with trio.fail_after(60):
        await sandbox.call(BashRun(command=ESCAPING, timeout_s=20), BashResult, timeout_s=30)
        code = "import subprocess; p = subprocess.Popen(['sleep', '1004'], start_new_session=True)"
        await sandbox.call(IpythonRun(code=code, timeout_s=20), CellResult, timeout_s=30)


async def test_everything_ends_with_the_connection_also_what_has_detached_itself(start_daemon, still_alive):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        await start_everything(sandbox)
        descendants = daemon.descendants()
        assert len(descendants) >= 8
        begun = trio.current_time()
    assert await daemon.wait_ended() == (0, "")
    assert trio.current_time() - begun < 4
    assert not still_alive(descendants)


async def test_a_killed_client_ends_the_daemon_in_the_middle_of_a_command(start_daemon, still_alive):
    daemon = start_daemon()
    daemon.wait_ready()
    client = f"""
import sys, trio
from prorl_ipc.channel import connect_unix
from prorl_ipc.client import open_rpc_client
from prorl_ipc.sandbox_calls import BashRun, BashResult
async def main():
    stream = await connect_unix({daemon.socket_path!r}, connect_timeout_s=5)
    async with open_rpc_client(stream, token="the token of the tests") as client:
        say = lambda name, data: print(data.decode(), flush=True)
        command = "trap '' INT TERM HUP; (setsid sleep 1000 &); (sleep 1000 &); echo begun; sleep 1000"
        await client.call(BashRun(command=command, timeout_s=60, stream=True), BashResult, timeout_s=60, on_chunk=say)
trio.run(main)
"""
    process = subprocess.Popen([sys.executable, "-c", client], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    descendants = daemon.descendants()
    process.kill()
    process.wait()
    process.stdout.close()
    begun = trio.current_time()
    assert await daemon.wait_ended() == (0, "")
    assert trio.current_time() - begun < 4
    assert len(descendants) >= 3  # bash and two sleeps
    assert not still_alive(descendants)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_it(start_daemon, still_alive, number):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        await sandbox.call(BashRun(command="(setsid sleep 1000 &)", timeout_s=20), BashResult, timeout_s=30)
        descendants = daemon.descendants()
        daemon.process.send_signal(number)
        assert await daemon.wait_ended() == (0, "")
        with pytest.raises(ChannelBroken), trio.fail_after(10):
            await sandbox.call(Ping(), Pong, timeout_s=5)
    assert not still_alive(descendants)


async def test_it_ends_when_whoever_started_it_is_gone_before_there_is_a_connection(start_daemon):
    daemon = start_daemon()
    daemon.wait_ready()
    daemon.process.stdin.close()
    assert await daemon.wait_ended() == (0, "")


async def test_it_outlives_its_standard_input_once_connected(start_daemon):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        daemon.process.stdin.close()
        for _ in range(3):
            await sandbox.call(BashRun(command="true", timeout_s=20), BashResult, timeout_s=30)
    assert await daemon.wait_ended() == (0, "")


async def test_it_ends_when_nobody_connects(start_daemon):
    daemon = start_daemon("--accept-timeout-s", "0.2")
    daemon.wait_ready()
    assert await daemon.wait_ended() == (0, "")


async def test_it_ends_when_it_is_told_nothing(start_daemon):
    daemon = start_daemon(start_line=b"")
    daemon.process.stdin.close()
    assert await daemon.wait_ended() == (0, "")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"not json\n", "malformed"),
        (b'{"token": ""}\n', "token is empty"),
        (b'{"env": {}}\n', "token"),
        (b'{"token": "t", "else": 1}\n', "else"),
        (b'{"token": "t", "cwd": "/nowhere/at/all"}\n', "/nowhere/at/all"),
    ],
)
async def test_a_wrong_start_line_is_an_error(start_daemon, line, complaint):
    daemon = start_daemon(start_line=line)
    exit_code, said = await daemon.wait_ended()
    assert exit_code == 2
    assert complaint in said
    assert said.startswith("prorl_daemon: ")
    assert len(said.splitlines()) == 1


async def test_it_does_not_wait_for_ever_for_its_start_line(start_daemon):
    daemon = start_daemon("--accept-timeout-s", "0.2", start_line=b'{"token": ')
    exit_code, said = await daemon.wait_ended()
    assert exit_code == 2
    assert "no start line" in said


async def test_a_wrong_token_is_refused_and_ends_it(start_daemon):
    daemon = start_daemon()
    daemon.wait_ready()
    with pytest.raises(HandshakeRefused):
        async with daemon.connect(token="another"):
            pass
    assert await daemon.wait_ended() == (0, "")


async def test_there_is_one_connection_and_never_another(start_daemon):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        # When the shell answers, no child is left that has been forked with the daemon's listening socket.
        await sandbox.call(BashRun(command="true", timeout_s=20), BashResult, timeout_s=30)
        with pytest.raises(ChannelBroken):
            await connect_unix(daemon.socket_path, connect_timeout_s=2)
        await sandbox.call(Ping(), Pong, timeout_s=10)
    assert await daemon.wait_ended() == (0, "")


async def test_the_token_is_in_no_argument_list_and_no_environment(start_daemon):
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        command = "cat /proc/*/cmdline /proc/*/environ 2> /dev/null | tr '\\0' '\\n' | grep -c 'token of the te[s]ts'"
        result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=30)
        assert result.output.strip().endswith("0")
    assert await daemon.wait_ended() == (0, "")


async def test_no_descriptor_is_lost_over_many_commands_and_restarts(sandbox):
    async def bash(command):
        await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=30)

    async def open_fds():
        return (await sandbox.call(Ping(), Pong, timeout_s=10)).open_fds

    with trio.fail_after(60):
        await bash("exit 1")
        await bash("true")
        before = await open_fds()
        for _ in range(10):
            await bash("true")
            await bash("exit 1")
        await bash("true")
        assert await open_fds() == before


async def test_orphans_are_reaped(sandbox):
    with trio.fail_after(30):
        command = "for i in 1 2 3 4 5; do (setsid true &); done; echo $PPID"
        result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=30)
        daemon_pid = int(result.output.splitlines()[-1])
        command = (
            f"for i in $(seq 100); do ps -o stat= --ppid {daemon_pid} | grep -q Z || exit 0; sleep 0.05; done; exit 1"
        )
        result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=30)
        assert result.exit_code == 0


def can_unshare() -> bool:
    return subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason=because("user namespaces are not allowed here", "prorl-trio doctor"))
async def test_it_works_as_the_first_process_of_a_pid_namespace(tmp_path):
    """There signals without a handler are ignored, and orphans come to it without asking."""
    client = f"""
import json, os, subprocess, sys, trio
from prorl_ipc.channel import connect_unix
from prorl_ipc.client import open_rpc_client
from prorl_ipc.sandbox_calls import BashResult, BashRun, CellResult, IpythonRun
async def main():
    os.makedirs({str(tmp_path / "s")!r}, mode=0o700)
    path = {str(tmp_path / "s" / "s")!r}
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-m",
               "prorl_daemon", "--socket", path]
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    daemon.stdin.write(json.dumps({{"token": "t"}}).encode() + b"\\n"); daemon.stdin.flush()
    assert daemon.stdout.readline() == b"READY\\n"
    async with open_rpc_client(await connect_unix(path, connect_timeout_s=5), token="t") as client:
        command = "(setsid sleep 1000 &); echo $PPID; (setsid true &); sleep 0.1; ls -d /proc/[0-9]* | wc -l"
        with trio.fail_after(30):
            result = await client.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=30)
            assert result.output.splitlines()[0] == "1", result
            result = await client.call(BashRun(command="exit 3", timeout_s=20), BashResult, timeout_s=30)
            assert result.restarted and result.exit_code == 3, result
            result = await client.call(IpythonRun(code="1+1", timeout_s=20), CellResult, timeout_s=30)
            assert result.result == "2", result
    assert daemon.wait(10) == 0
trio.run(main)
"""
    with trio.fail_after(60):
        done = await trio.run_process([sys.executable, "-c", client], check=False, capture_stderr=True)
    assert done.returncode == 0, done.stderr.decode()


def test_the_daemon_imports_neither_the_node_nor_ipython():
    heavy = {"IPython", "prorl_trio", "numpy", "ptyprocess"}
    code = f"import sys, prorl_daemon.daemon; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_socket_that_cannot_be_made_is_one_clear_line(tmp_path):
    os.chmod(tmp_path, 0o700)
    for path in (tmp_path / "missing" / "s", tmp_path / ("x" * 200)):
        done = subprocess.run(
            [sys.executable, "-m", "prorl_daemon", "--socket", str(path)],
            input='{"token": "t"}\n',
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
