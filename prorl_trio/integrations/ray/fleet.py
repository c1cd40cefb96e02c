"""Starting, finding and ending a fleet in a Ray cluster."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from prorl_trio.client import BlockingClient, connect
from prorl_trio.integrations.ray.actors import (
    CALL_TIMEOUT_S,
    NAMESPACE,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    FleetHead,
    FleetNode,
)
from prorl_trio.integrations.ray.plan import make_plan
from prorl_trio.types.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from prorl_trio.client import RolloutClient
    from prorl_trio.integrations.ray.plan import FleetPlan

logger = logging.getLogger(__name__)

HEAD_MACHINE: Final = {"node:__internal_head__": 0.001}
"""The machine of Ray's own head, with which the whole cluster would end."""
NOTICE_S: Final = 5.0
POLL_S: Final = 0.2


class RayFleet(AbstractContextManager["RayFleet"]):
    """A fleet in this Ray cluster. Tasks and actors may receive it. The end of a `with` block shuts it down."""

    def __init__(self, name: str, actors: Sequence[Any] = ()) -> None:
        self.name = name
        self._head = ray.get_actor(f"{name}/head", NAMESPACE)
        self._actors = actors  # actors that are not detached end with their handles
        self.plan = self._describe()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (self.name,)

    def __exit__(self, *_exc_info: object) -> None:
        self.shutdown()

    @property
    def url(self) -> str:
        """Return the address of the head, which it keeps when Ray restarts it. Raises ServiceError without a head."""
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

    def _describe(self) -> tuple[FleetPlan, str]:
        try:
            plan, url = ray.get(self._head.describe.remote(), timeout=START_TIMEOUT_S)
        except RayError as exc:
            raise ServiceError(f"the head of fleet {self.name!r} does not answer: {exc}") from exc
        return plan, url

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
        detached: the fleet outlives this driver. Otherwise Ray ends it with this driver, or with the returned object.
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
        _require_same(attach(name).plan, plan)
    try:
        group = _place(plan, deadline_s)
        actors = [_actor(FleetHead, plan, "head", HEAD_MACHINE).remote(plan)]
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


def _require_same(there: FleetPlan, plan: FleetPlan) -> None:
    fields = [name for name in plan.__struct_fields__ if name != "token"]
    different = [name for name in fields if getattr(there, name) != getattr(plan, name)]
    if different or not there.detached:
        why = f"has other settings ({', '.join(different)})" if there.detached else "belongs to another driver"
        remedy = f"use attach({plan.name!r}), end it with attach({plan.name!r}).shutdown(), or choose another name"
        raise ConfigError(f"a fleet {plan.name!r} is running and {why}; {remedy}")


def _actor_names(fleet: str = "") -> list[str]:
    """Return the names of the actors of a fleet, or of all fleets."""
    names = [each["name"] for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
    return [name for name in names if not fleet or name.startswith(f"{fleet}/")]


def _actor(kind: type, plan: FleetPlan, name: str, resources: Mapping[str, float], **options: Any) -> Any:
    """Return the class, ready to create its actor or to find the existing one."""
    return ray.remote(kind).options(
        name=f"{plan.name}/{name}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached" if plan.detached else None,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=8,
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources={key: value for key, value in resources.items() if key not in ("CPU", "GPU")},
        **options,
    )


def _groups(fleet: str) -> list[PlacementGroup]:
    tables = placement_group_table().values()
    there = [each for each in tables if each["name"] == f"{NAMESPACE}/{fleet}" and each["state"] != "REMOVED"]
    return [PlacementGroup(ray.PlacementGroupID(bytes.fromhex(each["placement_group_id"]))) for each in there]


def _place(plan: FleetPlan, deadline_s: float) -> PlacementGroup:
    """Return the fleet's placement group, once Ray has reserved a machine for each node."""
    lifetime = "detached" if plan.detached else None
    bundles, label = [plan.resources] * plan.nodes, f"{NAMESPACE}/{plan.name}"
    group = next(iter(_groups(plan.name)), None) or placement_group(bundles, "STRICT_SPREAD", label, lifetime)
    if group.wait(min(NOTICE_S, max(0.0, deadline_s - time.monotonic()))):
        return group
    machines = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    large = sum(all(each.get(key, 0) >= value for key, value in plan.resources.items()) for each in machines)
    why = (
        f"fleet {plan.name!r} needs {plan.nodes} machines with {plan.resources} free on each; the Ray cluster has "
        f"{len(machines)}, of which {large} have that much in total"
    )
    logger.warning("%s; waiting for more", why)
    if group.wait(max(0.0, deadline_s - time.monotonic())):
        return group
    raise ConfigError(f"{why}; ask for fewer nodes or resources, or free some: `ray status` shows their use")


def _wait_started(plan: FleetPlan, actors: Sequence[Any], deadline_s: float) -> RayFleet:
    waiting = [actor.ready.remote() for actor in actors]
    failed = f"fleet {plan.name!r} did not start"
    try:
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
            if failure := ray.get(done[0]) if done else f"no time is left; the logs are in {plan.dir}":
                raise ServiceError(f"{failed}: {failure}")
        fleet = RayFleet(plan.name, actors)
    except RayError as exc:
        raise ServiceError(f"{failed}: {exc}") from exc
    with fleet.client() as client:
        while len(client.status()["members"]) < plan.nodes:
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{failed}: its head does not reach all nodes; see its log")
            time.sleep(POLL_S)
    return fleet


def _remove(name: str) -> None:
    """Kill the actors of a fleet, remove its placement group, and return when its names are free."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (names := _actor_names(name)) and time.monotonic() < deadline_s:
        for each in names:
            with suppress(ValueError, RayError):
                ray.kill(ray.get_actor(each, NAMESPACE))
        time.sleep(POLL_S)
    for group in _groups(name):
        remove_placement_group(group)
