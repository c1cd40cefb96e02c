"""Fleets in a Ray cluster: an actor for each node and one for the head, and the functions that start and find them.

Each actor owns a process under `prorl_launch.supervisor`, whose standard input it holds open: however the actor ends,
the whole process tree ends within `GRACE_S` seconds. The actor exits with its process, and Ray restarts both. Machines
need not share a disk: each node has its own rendezvous folder, whose entry its actor copies to the head's folder.
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
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from prorl_trio.client import BlockingClient, connect
from prorl_trio.config.secrets import TOKEN_VARIABLE
from prorl_trio.integrations.ray.plan import engine_url, make_plan
from prorl_trio.rendezvous.folder import claim_folder, read_entry, remove_entry, write_entry
from prorl_trio.rendezvous.head import read_head
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from prorl_trio.client import RolloutClient
    from prorl_trio.integrations.ray.plan import FleetPlan
    from prorl_trio.rendezvous.entry import NodeEntry

logger = logging.getLogger(__name__)

NAMESPACE: Final = "prorl-trio"
ACTOR: Final = {"namespace": NAMESPACE, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 8}
HEAD_MACHINE: Final = {"node:__internal_head__": 0.001}
"""The machine of Ray's own head, with which the whole cluster would end."""
ENGINE_METHODS: Final = ("get_server_address", "get_server_info")
"""The methods of verl's and SkyRL's servers that return their address."""
GRACE_S: Final = 3.0
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 10.0
INTERVAL_S: Final = 5.0
RETRY_S: Final = 1.0
"""Seconds before an actor whose node has ended exits, so that Ray does not start a broken node in a tight loop."""
POLL_S: Final = 0.25
LOG_TAIL_BYTES: Final = 3000
_started: Final[dict[str, Sequence[Any]]] = {}
"""The actors of this driver's fleets. Ray ends actors that are not detached when their last handle is gone."""


class ProcessActor:
    """An actor with one process. If the process does not even start the first time, the actor stays without it."""

    def __init__(self, plan: FleetPlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.address: str = ray.util.get_node_ip_address()
        self.folder = Path(plan.dir).expanduser() / plan.name / name
        self.rendezvous = self.folder / "fleet"
        self.config, self.log = self.folder / "node.toml", self.folder / "node.log"
        self.asked, self.ended = threading.Event(), threading.Event()
        with warnings.catch_warnings(action="ignore"):  # Ray's property warns about another one
            self.restarted: bool = ray.get_runtime_context().was_current_actor_reconstructed
        self._failure = ""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            claim_folder(self.rendezvous)
            self.start()
        except (OSError, ConfigError, ServiceError) as exc:  # Ray would abort the actor, and print hundreds of lines
            self._failure = f"{name} on {self.address}: {exc}"
            if self.restarted:
                self._exit(self._failure)

    def start(self) -> None:
        """Write the configuration, and run the process. Raises OSError, ConfigError or ServiceError."""

    def ready(self) -> str:
        """Return why the process did not start; empty if it did."""
        return self._failure

    def stop(self, drain_s: float) -> None:
        """Drain the process for at most this many seconds, then end it. Returns when its whole tree is gone."""
        self.asked.set()
        for wait_s in (max(drain_s, POLL_S), STOP_TIMEOUT_S):  # two signals at once would count as one
            self.signal(signal.SIGTERM)
            self.ended.wait(wait_s)
        self._leash.close()  # the supervisor kills what is left
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
        """Start the process, and wait until `find_pid` finds it in the rendezvous folder.

        Raises:
            ServiceError: it ended or is late; the message has the end of its log.
        """
        python, pipe = [sys.executable, "-m"], subprocess.PIPE
        argv = [*python, "prorl_launch.supervisor", str(GRACE_S), *python, "prorl_trio.cli", *command]
        argv.append(f"--config={self.config}")
        env = {**os.environ, TOKEN_VARIABLE: self.plan.token}
        with self.log.open("ab") as log:
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log, env=env, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self._leash, self._output = process.stdin, process.stdout
        self._pid = int((self._output.readline().split() or [b"0"])[0])
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._has_ended() or time.monotonic() > deadline_s:
                tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                self._leash.close()
                raise ServiceError(f"it did not start. The end of its log {self.log}:\n{tail}")
            with suppress(OSError, ConfigError):
                if find_pid() == self._pid:
                    break
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def tick(self) -> None:
        """Do the actor's periodic work, every `POLL_S` seconds."""

    def _has_ended(self) -> bool:
        """Wait for `POLL_S` seconds, or until the process and its tree have ended."""
        return bool(select.select([self._output], [], [], POLL_S)[0])

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while not self._has_ended():
            self.tick()
        code = process.wait()
        self.tick()
        self.ended.set()
        if not self.asked.is_set():
            self._exit(f"{self.name} has ended with exit code {code} and is started again; its log is {self.log}")

    def _exit(self, why: str) -> None:
        logger.error("%s", why)
        time.sleep(RETRY_S)
        os._exit(1)


class FleetNode(ProcessActor):
    """The actor of one node."""

    def start(self) -> None:
        """See `ProcessActor`."""
        plan = self.plan
        self._head = ray.get_actor(f"{plan.name}/head", NAMESPACE)
        self._path = self.rendezvous / f"{self.name}.json"
        self._entry: NodeEntry | None = None
        self._beat_ns = 0
        self._urls: dict[tuple[str, str], str] = {}
        self._troubles: dict[str, str] = {}
        self.write(plan.node_tables(self.name, self.address, self.folder, []))
        handlers = [f"--handler={handler}" for handler in plan.handlers]
        self.run(["serve", "--on-hangup=reload", *handlers], lambda: read_entry(self._path)[0].process.pid)
        if plan.backends:
            threading.Thread(target=self._use_engines, daemon=True).start()

    def tick(self) -> None:
        """Copy the node's entry to the head if it has changed."""
        try:
            entry, beat_ns = read_entry(self._path) if self._path.exists() else (None, 0)
            if known := entry or self._entry if beat_ns != self._beat_ns else None:
                ray.get(self._head.note.remote(known, entry is None), timeout=CALL_TIMEOUT_S)
            self._entry, self._beat_ns = entry, beat_ns
        except (RayError, ConfigError, FileNotFoundError) as exc:
            logger.info("a heartbeat of %s did not reach the head, and is repeated: %s", self.name, exc)

    def _use_engines(self) -> None:
        """Have the node reload its configuration while its entry shows other engines than the named ones."""
        while not self.asked.is_set():
            tables = self.plan.node_tables(self.name, self.address, self.folder, self._find_engines())
            with suppress(FileNotFoundError, ConfigError):
                if read_entry(self._path)[0].backends.keys() != {*tables["backends"]["urls"]}:
                    self.write(tables)
                    self.signal(signal.SIGHUP)
            self.asked.wait(INTERVAL_S)

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
                if not (method := next((each for each in methods if hasattr(actor, each)), "")):
                    raise ConfigError(f"it lacks the method {' or '.join(methods)}; name its own as backend_method")
                self._urls[key] = engine_url(ray.get(getattr(actor, method).remote(), timeout=RETRY_S))
            except (RayError, ConfigError, ValueError) as exc:  # ValueError: the actor has just ended
                troubles[key[0]] = str(exc)
        for name in troubles.keys() - self._troubles.keys():
            logger.warning("the engine of actor %r is not used yet: %s", name, troubles[name])
        self._troubles = troubles
        return sorted({*self._urls.values()})


class FleetHead(ProcessActor):
    """The actor of the head. A restarted head waits for its former port, so that trainers find it there."""

    def start(self) -> None:
        """See `ProcessActor`."""
        port = self.plan.tables["listen"].get("port", 0)
        if self.restarted:
            with suppress(OSError, ConfigError):
                port = urlsplit(read_head(self.rendezvous).url).port
        self.write(self.plan.head_tables(self.address, port, self.folder))
        self.run(["fleet"], lambda: read_head(self.rendezvous).process.pid)

    def describe(self) -> tuple[FleetPlan, str]:
        """Return the plan, which has the token, and the URL of the head."""
        return self.plan, read_head(self.rendezvous).url

    def note(self, entry: NodeEntry, left: bool) -> None:
        """Record a heartbeat of a node, or that it has left."""
        (remove_entry if left else write_entry)(self.rendezvous, entry)


class RayFleet(AbstractContextManager["RayFleet"]):
    """A fleet in this Ray cluster. Tasks and actors may receive it. The end of a `with` block shuts it down.

    Methods raise ServiceError while the head does not answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._head = ray.get_actor(f"{name}/head", NAMESPACE)
        self.plan = self._describe()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (self.name,)

    def __exit__(self, *_exc_info: object) -> None:
        self.shutdown()

    @property
    def url(self) -> str:
        """Return the address of the head, which it keeps when Ray restarts it."""
        return self._describe()[1]

    def client(self, **options: Any) -> BlockingClient:
        """Return a client for programs without trio. See `BlockingClient` for the options, such as `session_id`."""
        return BlockingClient(self.url, self.plan.token, **options)

    def connect(self, **options: Any) -> AbstractAsyncContextManager[RolloutClient]:
        """Return a client for trio programs. See `prorl_trio.client.connect` for the options."""
        return connect(self.url, self.plan.token, **options)

    def status(self) -> dict[str, Any]:
        """Return the state of the fleet, as `BlockingClient.status`."""
        with self.client() as client:
            return client.status()

    def shutdown(self, drain_s: float = 0.0) -> None:
        """End all processes, actors and the placement group. Calling it again has no effect.

        The nodes first wait for running jobs, at most for `drain_s` seconds, and cancel the rest. Ledgers, which
        contain undelivered outcomes, and logs stay on the machines' disks.
        """
        stops = []
        for name in _actor_names(self.name):
            with suppress(ValueError):  # it has ended in between
                margin_s = CALL_TIMEOUT_S if name.endswith("/head") else 0.0  # for the nodes' last outcomes
                stops.append(ray.get_actor(name, NAMESPACE).stop.remote(drain_s + margin_s))
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=drain_s + 3 * STOP_TIMEOUT_S)
        _remove(self.name)

    def _describe(self) -> tuple[FleetPlan, str]:
        try:
            plan, url = ray.get(self._head.describe.remote(), timeout=START_TIMEOUT_S)
        except RayError as exc:
            raise ServiceError(f"the head of fleet {self.name!r} does not answer: {exc}") from exc
        return plan, url


def start_fleet(
    nodes: int,
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    name: str = "rollouts",
    dir: str | PathLike[str] = "~/.local/state/prorl-trio/ray",
    backends: Sequence[str] = (),
    backend_method: str = "",
    handlers: Sequence[str] = (),
    resources: Mapping[str, float] | None = None,
    detached: bool = True,
    timeout_s: float = 300.0,
) -> RayFleet:
    """Start a fleet in the Ray cluster of this driver. Return when its head has all nodes.

    Ray places each node on its own machine, and restarts lost nodes, on other machines if necessary. The head runs on
    the machine of Ray's head. If the same detached fleet exists already, it is completed and returned.

    Args:
        nodes: number of nodes.
        config: the node.toml of all nodes, as a path on this machine or as its tables. The head uses it as well.
        name: of the fleet, for `attach`.
        dir: a folder on each machine's own disk, for ledgers and logs.
        backends: names of actors, of any namespace, whose engines every node uses. `*` stands for any characters.
        backend_method: the method of these actors that returns the engine's address: a URL, `HOST:PORT`, a pair, or an
            object with `url`. By default, `get_server_address` (verl) or `get_server_info` (SkyRL).
        handlers: additional handlers, as `MODULE:CLASS`, for example from Ray's `runtime_env`.
        resources: Ray resources of each node. By default one CPU.
        detached: the fleet outlives this driver. Otherwise Ray ends it with this driver.
        timeout_s: longest wait for machines and nodes.

    Raises:
        ConfigError: a setting is wrong, the name is in use by a different fleet, or machines are missing.
        ServiceError: a process did not start. Everything that this call has started is ended again.
    """
    if not ray.is_initialized():
        raise ConfigError("start_fleet needs a Ray cluster; call ray.init(address='auto') first")
    settings = {"backends": backends, "backend_method": backend_method, "handlers": handlers, "detached": detached}
    plan = make_plan(config, name=name, nodes=nodes, dir=str(dir), resources=resources or {"CPU": 1}, **settings)
    deadline_s = time.monotonic() + timeout_s
    exists = f"{name}/head" in _actor_names(name)
    if exists:
        there = attach(name).plan
        if why := plan.objection(there):
            remedy = f"use attach({name!r}), end it with attach({name!r}).shutdown(), or choose another name"
            raise ConfigError(f"a fleet {name!r} is running and {why}; {remedy}")
        plan = there  # with its token
    try:
        group = _place(plan, deadline_s)
        actors = _started[name] = [_actor(FleetHead, plan, "head", HEAD_MACHINE).remote(plan, "head")]
        for number in range(nodes):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actor = _actor(FleetNode, plan, f"{name}-{number}", plan.resources, scheduling_strategy=where)
            actors.append(actor.remote(plan, f"{name}-{number}"))
        return _wait_started(plan, actors, deadline_s)
    except BaseException:
        if not exists:
            _remove(name)
        raise


def attach(name: str = "rollouts") -> RayFleet:
    """Return the fleet of this name, from any driver, task or actor of the Ray cluster.

    Raises:
        ConfigError: it does not exist.
    """
    try:
        return RayFleet(name)
    except ValueError:
        there = sorted({each.partition("/")[0] for each in _actor_names()}) or "none"
        raise ConfigError(f"no fleet is named {name!r} here; there are {there}; call start_fleet") from None


def _actor_names(fleet: str = "") -> list[str]:
    """Return the names of the actors of a fleet, or of all fleets."""
    names = [each["name"] for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
    return [name for name in names if not fleet or name.startswith(f"{fleet}/")]


def _actor(kind: type, plan: FleetPlan, name: str, resources: Mapping[str, float], **options: Any) -> Any:
    """Return the class, ready to create its actor or to find the existing one."""
    custom = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU")}
    amounts = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": custom}
    found = {"name": f"{plan.name}/{name}", "get_if_exists": True, "lifetime": "detached" if plan.detached else None}
    return ray.remote(kind).options(**ACTOR, **found, **amounts, **options)


def _groups(fleet: str) -> list[PlacementGroup]:
    tables = placement_group_table().values()
    there = [each for each in tables if each["name"] == f"{NAMESPACE}/{fleet}" and each["state"] != "REMOVED"]
    return [PlacementGroup(ray.PlacementGroupID(bytes.fromhex(each["placement_group_id"]))) for each in there]


def _place(plan: FleetPlan, deadline_s: float) -> PlacementGroup:
    """Return the fleet's placement group, once Ray has reserved a machine for each node."""
    lifetime = "detached" if plan.detached else None
    bundles, label = [plan.resources] * plan.nodes, f"{NAMESPACE}/{plan.name}"
    group = next(iter(_groups(plan.name)), None) or placement_group(bundles, "STRICT_SPREAD", label, lifetime)
    why = ""
    for wait_s in (INTERVAL_S, float("inf")):
        if why:
            logger.warning("%s; waiting for more", why)
        if group.wait(max(0.0, min(wait_s, deadline_s - time.monotonic()))):
            return group
        machines = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        large = sum(all(each.get(key, 0) >= value for key, value in plan.resources.items()) for each in machines)
        why = f"{plan!r} needs {plan.nodes} machines with {plan.resources} free on each; the Ray cluster has "
        why += f"{len(machines)}, of which {large} have that much in total"
    raise ConfigError(f"{why}; ask for fewer nodes or resources, or free some: `ray status` shows their use")


def _wait_started(plan: FleetPlan, actors: Sequence[Any], deadline_s: float) -> RayFleet:
    waiting = [actor.ready.remote() for actor in actors]
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            raise ServiceError(f"{plan!r} has not started within timeout_s; its logs are in {plan.dir}")
        try:
            failure = ray.get(done[0])
        except RayError as exc:
            failure = str(exc)
        if failure:
            raise ServiceError(f"{plan!r} did not start: {failure}")
    fleet = RayFleet(plan.name)
    with fleet.client() as client:
        while len(client.status()["members"]) < plan.nodes:
            if time.monotonic() > deadline_s:
                raise ServiceError(f"the head of {plan!r} does not reach all nodes; see its log")
            time.sleep(POLL_S)
    return fleet


def _remove(name: str) -> None:
    """Kill the actors of a fleet, remove its placement group, and return when its names are free."""
    _started.pop(name, None)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (names := _actor_names(name)) and time.monotonic() < deadline_s:
        for each in names:
            with suppress(ValueError, RayError):
                ray.kill(ray.get_actor(each, NAMESPACE))
        time.sleep(POLL_S)
    for group in _groups(name):
        remove_placement_group(group)
