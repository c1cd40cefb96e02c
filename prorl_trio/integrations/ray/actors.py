"""The actors of a fleet: one per node, and one for the head. Each owns a process, and is restarted by Ray with it.

The process runs under `prorl_launch.supervisor`, whose standard input the actor holds open. However the actor ends, the
whole process tree ends within `GRACE_S` seconds. Machines need not share a disk: each node has its own rendezvous
folder, and its actor copies the node's entry into the head's folder at each heartbeat.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import ray
from ray.exceptions import RayError

from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.integrations.ray.plan import engine_url
from prorl_trio.rendezvous.folder import claim_folder, read_entry, remove_entry, write_entry
from prorl_trio.rendezvous.head import read_head
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.integrations.ray.plan import FleetPlan
    from prorl_trio.rendezvous.entry import NodeEntry

logger = logging.getLogger(__name__)

NAMESPACE: Final = "prorl-trio"
GRACE_S: Final = 3.0
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 10.0
RETRY_S: Final = 1.0
POLL_S: Final = 0.25
ENGINES_INTERVAL_S: Final = 5.0
ENGINE_METHODS: Final = ("get_server_address", "get_server_info")
"""The methods of verl's and SkyRL's servers that return their address."""
LOG_TAIL_BYTES: Final = 3000


class ProcessActor:
    """An actor with one process. If the process ends unasked, the actor exits, and Ray restarts it.

    A process that does not even start the first time is not restarted: `ready` returns the reason.
    """

    def __init__(self, plan: FleetPlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.address: str = ray.util.get_node_ip_address()
        self.folder = Path(plan.dir).expanduser() / plan.name / name
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.rendezvous = claim_folder(self.folder / "fleet")
        self.config, self.log = self.folder / "node.toml", self.folder / "node.log"
        self.asked, self.ended = threading.Event(), threading.Event()
        with warnings.catch_warnings(action="ignore"):  # Ray's property warns about another one
            self.restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed

    def ready(self) -> str:
        """Return why the process did not start; empty if it did."""
        return self._failure

    def stop(self, drain_s: float) -> None:
        """Drain the process for at most this many seconds, then end it. Returns when its whole tree is gone."""
        self.asked.set()
        for wait_s in (max(drain_s, POLL_S), STOP_TIMEOUT_S):  # two signals at once would count as one
            self.signal(signal.SIGTERM)
            self.ended.wait(wait_s)
        assert self._process.stdin is not None
        self._process.stdin.close()  # the supervisor kills what is left
        self.ended.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.rendezvous, ignore_errors=True)  # its files contain the token

    def write(self, tables: dict[str, Any]) -> None:
        """Write the configuration of the process."""
        self.config.touch(mode=0o600)
        self.config.write_bytes(msgspec.toml.encode(tables))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it lives."""
        if self._pid and not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def run(self, command: list[str], find_pid: Callable[[], int]) -> None:
        """Start the process, and wait until `find_pid` finds it in the rendezvous folder."""
        python, pipe = [sys.executable, "-m"], subprocess.PIPE
        argv = [*python, "prorl_launch.supervisor", str(GRACE_S), *python, "prorl_trio.cli", *command]
        argv.append(f"--config={self.config}")
        env = {**os.environ, TOKEN_VARIABLE: self.plan.token}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log, env=env, start_new_session=True)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._pid = int((self._output.readline().split() or [b"0"])[0])
        self._failure = self._wait_found(find_pid)
        if self._failure and self.restarted:
            self._exit(self._failure)
        threading.Thread(target=self._watch, daemon=True).start()

    def tick(self) -> None:
        """Do the actor's periodic work, every `POLL_S` seconds."""

    def _wait_found(self, find_pid: Callable[[], int]) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (ended := self._has_ended()) and time.monotonic() < deadline_s:
            with suppress(OSError, ConfigError):
                if find_pid() == self._pid:
                    return ""
        why = "has ended" if ended else f"is not ready after {START_TIMEOUT_S:g} s"
        tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"{self.name} on {self.address} {why}. The end of its log {self.log}:\n{tail}"

    def _has_ended(self) -> bool:
        """Wait for `POLL_S` seconds, or until the process and its tree have ended."""
        return bool(select.select([self._output], [], [], POLL_S)[0])

    def _watch(self) -> None:
        while not self._has_ended():
            self.tick()
        code = self._process.wait()
        self.tick()
        self.ended.set()
        if not self.asked.is_set() and not self._failure:
            self._exit(f"{self.name} has ended with exit code {code} and is started again; its log is {self.log}")

    def _exit(self, why: str) -> None:
        logger.error("%s", why)
        time.sleep(RETRY_S)
        os._exit(1)


class FleetNode(ProcessActor):
    """The actor of one node."""

    def __init__(self, plan: FleetPlan, node_id: str) -> None:
        super().__init__(plan, node_id)
        self._head = ray.get_actor(f"{plan.name}/head", NAMESPACE)
        self._path = self.rendezvous / f"{node_id}.json"
        self._entry: NodeEntry | None = None
        self._beat_ns = 0
        self._urls: dict[tuple[str, str], str] = {}
        self._troubles: dict[str, str] = {}
        self.write(plan.node_tables(node_id, self.address, self.folder, []))
        handlers = [f"--handler={handler}" for handler in plan.handlers]
        self.run(["serve", "--on-hangup=reload", *handlers], lambda: self._read()[0].process.pid)
        if plan.backends and not self.ready():
            threading.Thread(target=self._use_engines, daemon=True).start()

    def tick(self) -> None:
        """Copy the node's entry to the head if it has changed."""
        try:
            entry, beat_ns = self._read() if self._path.exists() else (None, 0)
            if entry is not None and beat_ns != self._beat_ns:
                ray.get(self._head.renew.remote(entry), timeout=CALL_TIMEOUT_S)
            elif entry is None and self._entry is not None:  # it has left
                ray.get(self._head.remove.remote(self._entry), timeout=CALL_TIMEOUT_S)
            self._entry, self._beat_ns = entry, beat_ns
        except (RayError, ConfigError, FileNotFoundError) as exc:
            logger.info("a heartbeat of %s did not reach the head, and is repeated: %s", self.name, exc)

    def _read(self) -> tuple[NodeEntry, int]:
        return read_entry(self._path)

    def _use_engines(self) -> None:
        """Have the node reload its configuration while its entry shows other engines than the named ones."""
        while not self.asked.is_set():
            tables = self.plan.node_tables(self.name, self.address, self.folder, self._find_engines())
            with suppress(FileNotFoundError, ConfigError):
                if self._read()[0].backends.keys() != {url.rstrip("/") for url in tables["backends"]["urls"]}:
                    self.write(tables)
                    self.signal(signal.SIGHUP)
            self.asked.wait(ENGINES_INTERVAL_S)

    def _find_engines(self) -> list[str]:
        """Return the addresses of the named engines. An actor that does not answer keeps its former address."""
        there = [(each["name"], each["namespace"]) for each in ray.util.list_named_actors(all_namespaces=True)]
        actors = [key for key in there if any(fnmatchcase(key[0], pattern) for pattern in self.plan.backends)]
        unmatched = [each for each in self.plan.backends if not any(fnmatchcase(name, each) for name, _ in actors)]
        troubles = dict.fromkeys(unmatched, "no actor has this name now")
        methods = [self.plan.backend_method] if self.plan.backend_method else ENGINE_METHODS
        self._urls = {key: url for key, url in self._urls.items() if key in actors}
        for key in actors:
            try:
                actor = ray.get_actor(*key)
                if method := next((each for each in methods if hasattr(actor, each)), ""):
                    self._urls[key] = engine_url(ray.get(getattr(actor, method).remote(), timeout=RETRY_S))
                else:
                    troubles[key[0]] = f"it lacks the method {' or '.join(methods)}; name its own as backend_method"
            except (RayError, ConfigError, ValueError) as exc:  # ValueError: the actor has just ended
                troubles[key[0]] = str(exc)
        for name in troubles.keys() - self._troubles.keys():
            logger.warning("the engine of actor %r is not used yet: %s", name, troubles[name])
        self._troubles = troubles
        return sorted({*self._urls.values()})


class FleetHead(ProcessActor):
    """The actor of the head. A restarted head waits for its former port, so that trainers find it there."""

    def __init__(self, plan: FleetPlan) -> None:
        super().__init__(plan, "head")
        port = plan.tables["listen"].get("port", 0)
        if self.restarted:
            with suppress(OSError, ConfigError):
                port = urlsplit(read_head(self.rendezvous).url).port
        self.write(plan.head_tables(self.address, port, self.folder))
        self.run(["fleet"], lambda: read_head(self.rendezvous).process.pid)

    def describe(self) -> tuple[FleetPlan, str]:
        """Return the plan, which has the token, and the URL of the head."""
        return self.plan, read_head(self.rendezvous).url

    def renew(self, entry: NodeEntry) -> None:
        """Record a heartbeat of a node."""
        write_entry(self.rendezvous, entry)

    def remove(self, entry: NodeEntry) -> None:
        """Remove the entry of a node that has left."""
        remove_entry(self.rendezvous, entry)
