"""NeMo Gym's own servers, from its wheel, in their environment, beside a node of the test."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from prorl_launch.paths import import_path
from support.skips import because

TESTS = Path(__file__).parents[1]
CHECKOUT = TESTS.parent
AGENT = "responses_api_agents/prorl_trio_agent"
START_TIMEOUT_S = 240
PAGE = (CHECKOUT / "docs/nemo-gym.md").read_text()
"""The guide: what is run here is what it shows."""


def shown(language):
    """The blocks of the guide in that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def gym_python():
    """The Python of Gym's environment, which is made once. Skips without a Python that is new enough."""
    names = ("python3.13", "python3.12", "python3.14")
    places = [
        *map(shutil.which, names),
        *sorted(Path.home().glob(".pyenv/versions/3.1[234].*/bin/python"), reverse=True),
    ]
    found = next((str(place) for place in places if place and _works(place)), None)
    if found is None:
        pytest.skip(because("NeMo Gym needs Python 3.12 or newer, and there is none", "install python3.13"))
    env = os.environ | {"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT}/ipc:{CHECKOUT}/launch"}
    subprocess.run([found, "-m", "prorl_launch.setup", "nemo-gym"], cwd=CHECKOUT, env=env, check=True)
    asked = "from prorl_launch import environments as e, paths; print(paths.environment_dir(e.nemo_gym_environment()))"
    done = subprocess.run([found, "-c", asked], cwd=CHECKOUT, env=env, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "bin" / "python"


def _works(place):
    done = subprocess.run([place, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return done.returncode == 0


def free_ports(number):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


class GymRig:
    """Gym's processes, in a folder of their own, by the commands of the guide."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        self.ports = dict(zip(("head_server", "agent", *SERVERS), free_ports(2 + len(SERVERS)), strict=True))
        self.env = os.environ | {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{import_path()}:{TESTS}",
            "HOME": str(folder),
            "RAY_ADDRESS": "local",  # whatever else runs here
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(folder),
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_USAGE_STATS_ENABLED": "0",
            "WANDB_MODE": "disabled",
        }
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of its processes imports the same modules
        # One environment for all servers, whereas Gym would install one for each.
        for server in (*(f"resources_servers/{name}" for name in SERVERS.values()), AGENT):
            venv = folder / "venvs" / server / ".venv"
            venv.parent.mkdir(parents=True)
            venv.symlink_to(python.parents[1])

    def write_files(self, token):
        """What the guide has one write: the servers, and the file of the token."""
        counter = shown("yaml")[0]
        parts = [
            counter.replace("counter", name).replace(SERVERS["counter"], server).replace("12002", str(self.ports[name]))
            for name, server in SERVERS.items()
        ]
        (self.folder / "servers.yaml").write_text("".join(parts))
        (self.folder / "prorl-token").touch(0o600)
        (self.folder / "prorl-token").write_text(f"{token}\n")

    def url(self, name):
        return f"http://127.0.0.1:{self.ports[name]}"

    def line(self, text, *more):
        """A command line of the guide, with this rig's places, and `more` for tests."""
        head = f"++head_server.host=127.0.0.1 ++head_server.port={self.ports['head_server']}"
        return f"{text.strip().replace('/shared', str(self.folder))} {head} {' '.join(more)}"

    async def run(self, line):
        """Run a command line to its end; return what it wrote."""
        argv = ["bash", "-ec", line]
        done = await trio.run_process(
            argv, cwd=self.folder, env=self.env, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-6000:]
        return done.stdout.decode(errors="replace")

    async def serve(self, url, *, task_status):
        """Copy and start the servers, as the guide does, and keep them until cancelled."""
        _, copy, start = shown("sh")[0].split("\n", 2)
        await self.run(copy)
        ours = f"++prorl_trio_agent.{AGENT.replace('/', '.')}"
        start = start.replace("ws://127.0.0.1:8700", url).replace("agent.yaml]", "agent.yaml,servers.yaml]")
        more = ("+skip_venv_if_present=true", f"+uv_venv_dir={self.folder}/venvs", f"{ours}.port={self.ports['agent']}")
        argv = ["bash", "-c", f"exec {self.line(start, *more)}"]
        log = self.folder / "gym.log"
        with log.open("wb") as out:
            process = await trio.lowlevel.open_process(
                argv, cwd=self.folder, env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            with trio.fail_after(START_TIMEOUT_S):  # noqa: ASYNC912
                while "servers ready! Polling" not in log.read_text(errors="replace"):
                    assert process.poll() is None, log.read_text(errors="replace")[-6000:]
                    await trio.sleep(0.1)
            task_status.started()
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(20, shield=True):
                await _end(process)


async def _end(process):
    """Its servers get what it gets at a terminal, and Ray's processes end with its own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        with trio.move_on_after(15):
            await process.wait()
            break
    await trio.lowlevel.checkpoint()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


SERVERS = {
    "multi_step": "example_multi_step",
    "counter": "example_session_state_mgmt",
    "weather": "example_single_tool_call",
}
"""Resources servers of the wheel that need neither packages nor a network, by their names in node.toml."""


@asynccontextmanager
async def open_gym(python):
    """A short folder, because the paths of Ray's sockets are long, with Gym's files in it."""
    folder = Path(tempfile.mkdtemp(prefix="gym-", dir="/tmp"))
    try:
        yield GymRig(folder, python)
    finally:
        shutil.rmtree(folder)
