"""NeMo Gym's own servers, from its wheel, in their environment, beside a node of the test."""

from __future__ import annotations

import os
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

import prorl_trio.integrations.nemo_gym as adapter
from prorl_launch.paths import import_path
from support.skips import because

TESTS = Path(__file__).parents[1]
CHECKOUT = TESTS.parent
AGENT = "responses_api_agents/prorl_trio_agent"
START_TIMEOUT_S = 240


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
    """Gym's processes, in the folder `folder` with our agent server as the guide has it copied."""

    def __init__(self, folder, python, variables):
        self.folder, self.python = folder, python
        self.ports = dict(zip(("head_server", "agent", *SERVERS), free_ports(2 + len(SERVERS)), strict=True))
        (folder / "out").mkdir()
        shutil.copytree(Path(adapter.__path__[0]) / AGENT, folder / AGENT)
        servers = ((name, server, self.ports[name]) for name, server in SERVERS.items())
        (folder / "servers.yaml").write_text("".join(map(SERVER.format, *zip(*servers, strict=True))))
        for server in (*(f"resources_servers/{name}" for name in SERVERS.values()), AGENT):
            venv = folder / "venvs" / server / ".venv"
            venv.parent.mkdir(parents=True)
            venv.symlink_to(python.parents[1])
        self.env = os.environ | {
            "PYTHONPATH": f"{import_path()}:{TESTS}",
            "HOME": str(folder),
            "RAY_ADDRESS": "local",  # whatever else runs here
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(folder),
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_USAGE_STATS_ENABLED": "0",
            "WANDB_MODE": "disabled",
            **variables,
        }
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of its processes imports the same modules

    def url(self, name):
        return f"http://127.0.0.1:{self.ports[name]}"

    def gym(self, *arguments):
        """The command line of a command of Gym's."""
        head = [f"++head_server.host=127.0.0.1 ++head_server.port={self.ports['head_server']}".split()]
        return [str(self.python.with_name("gym")), *arguments, *head[0]]

    async def run(self, *argv):
        """Run a command to its end; return what it wrote."""
        done = await trio.run_process(
            argv, cwd=self.folder, env=self.env, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-6000:]
        return done.stdout.decode(errors="replace")

    async def serve(self, *, task_status):
        """Start the servers, and keep them until cancelled."""
        configs = f"{AGENT}/configs/prorl_trio_agent.yaml,servers.yaml"
        argv = self.gym(
            "env", "start", f"+config_paths=[{configs}]", "+prorl_url=null", "+prorl_token_file=null",
            f"++prorl_trio_agent.{AGENT.replace('/', '.')}.node.endpoint_file={self.folder}/endpoint.json",
            f"++prorl_trio_agent.{AGENT.replace('/', '.')}.port={self.ports['agent']}",
            "+skip_venv_if_present=true", f"+uv_venv_dir={self.folder}/venvs",
        )  # fmt: skip
        log = self.folder / "gym.log"
        with log.open("wb") as out:
            process = await trio.lowlevel.open_process(
                argv, cwd=self.folder, env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            with trio.fail_after(START_TIMEOUT_S):
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
SERVER = """\
{}:
  resources_servers:
    {}: {{entrypoint: app.py, domain: agent, host: 127.0.0.1, port: {}}}
"""


@asynccontextmanager
async def open_gym(python, **variables):
    """A short folder, because the paths of Ray's sockets are long, with Gym's files in it."""
    folder = Path(tempfile.mkdtemp(prefix="gym-", dir="/tmp"))
    try:
        yield GymRig(folder, python, variables)
    finally:
        await trio.to_thread.run_sync(shutil.rmtree, folder)
