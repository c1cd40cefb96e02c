"""Run by the Python of Ray's environment: fleets in a cluster of several raylets, with kills of everything.

python -m support.ray_cluster FOLDER: writes results.json, with the traceback of each case; empty where it passed.

Each raylet is a machine of its own to Ray. The engines are actors, so that the fleet finds them by name.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import ray
import trio
from ray.cluster_utils import Cluster

from prorl_ipc.session import Accepted
from prorl_trio.integrations.ray import attach, start_fleet
from prorl_trio.integrations.ray.fleet import NAMESPACE, _groups
from prorl_trio.integrations.ray.plan import engine_url
from prorl_trio.rendezvous.entry import has_ended
from prorl_trio.rendezvous.folder import read_entry
from prorl_trio.rendezvous.head import read_head
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, ServiceError
from prorl_trio.types.models import JobSpec, TaskInstance
from support.remains import marked

GUIDE = Path(__file__).parents[2] / "docs/ray.md"
MIB = 1024 * 1024
WITHIN_S = 60
TEMPORARY = Path(os.environ["TMPDIR"])
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
"""How soon Ray notices the loss of a machine."""


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def until(done, what):
    deadline = time.monotonic() + WITHIN_S
    while not (found := done()):
        assert time.monotonic() < deadline, f"not within {WITHIN_S} s: {what}"
        time.sleep(0.05)
    return found


def job(name):
    question = {"question": "6 * 7?", "answer": "42"}
    return JobSpec(job_id=name, instance=TaskInstance(instance_id="q", handler="math", payload=question))


class Engine:
    """An actor with an engine, as verl has them."""

    def __init__(self, model):
        tiny = make_tiny_model(Path(model))
        answer = tiny.turn(r"\boxed{42}")
        config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
        up = threading.Event()

        async def serve():
            async with open_fake_engine(
                script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=config
            ) as self.engine:
                self.token = trio.lowlevel.current_trio_token()
                up.set()
                await trio.sleep_forever()

        threading.Thread(target=trio.run, args=(serve,), daemon=True).start()
        assert up.wait(30)

    def get_server_address(self):
        host, _, port = self.engine.url.removeprefix("http://").partition(":")
        return host, int(port)

    def set_held(self, held):
        change = self.engine.hold if held else self.engine.release
        trio.from_thread.run_sync(change, trio_token=self.token)

    def running(self):
        return self.engine.stats.running

    def end(self):
        os._exit(1)


def start_engine(folder, name):
    options = {"name": name, "namespace": "trainer", "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    engine = ray.remote(Engine).options(**options).remote(str(folder / "model"))
    ray.get(engine.running.remote())
    return engine


def config_of(folder):
    return {
        "model": {"path": str(folder / "model")},
        "ledger": {"log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 64 * MIB},
        "fleet": {"heartbeat_interval_s": 0.5, "stale_after_s": 5.0},
        "stages": {"run_workers": 4},
        "sandbox": {"provider": "process", "max_warm": 0},
        "arena": {"size_bytes": 16 * MIB},
    }


class Rig:
    """The cluster, its fleet and its engine."""

    def __init__(self, folder, cluster):
        self.folder, self.cluster = folder, cluster
        self.dir = folder / ".local/state/prorl-trio/ray"
        self.engine = start_engine(folder, "vllm_server_0_0")
        self.fleet: Any = None

    def start(self, name, nodes=1, **options):
        options = {"backends": ["vllm_server_*"], "config": self.folder / "node.toml", "timeout_s": 120, **options}
        return start_fleet(nodes, name=name, **options)

    def url(self):
        return engine_url(ray.get(self.engine.get_server_address.remote()))

    def backends(self):
        return [each["url"] for each in self.fleet.status()["backends"]["backends"]]

    def entries(self):
        """The entries of the fleet's nodes, as the head finds them."""
        names = [self.dir / f"rollouts/head/fleet/rollouts-{n}.json" for n in range(2)]
        return [read_entry(path)[0] for path in names if path.exists()]

    def finish(self, client, names):
        """Every job has one outcome."""
        outcomes = list(client.results(len(names), timeout_s=WITHIN_S))
        assert sorted(outcome.job_id for outcome in outcomes) == sorted(names)
        assert {outcome.reward for outcome in outcomes} == {1.0}
        assert all(outcome.trajectory.segments[0].token_ids.size for outcome in outcomes)
        session = client.status()["sessions"][client.session_id]
        assert (session["last_cursor"], session["running"]) == (len(names), 0), "nothing comes twice"

    def over(self, what, strike):
        """Jobs run while `strike` kills something; each has one outcome, and the fleet is whole again."""
        names = [f"{what}-{n}" for n in range(6)]
        ray.get(self.engine.set_held.remote(True))
        before = self.fleet.url
        with self.fleet.client(session_id=what) as client:
            assert all(isinstance(answer, Accepted) for answer in client.submit([job(name) for name in names]))
            until(lambda: ray.get(self.engine.running.remote()) == 6, "all jobs wait for the engine")
            ended = strike()
            ray.get(self.engine.set_held.remote(False))
            self.finish(client, names)
        until(ended, f"{what} has an end")
        self.whole()
        assert self.fleet.url == before, "trainers find the head where it was"

    def whole(self):
        def is_whole():
            try:
                return len(self.fleet.status()["members"]) == 2
            except ServiceError:
                return False

        until(is_whole, "two members")

    def write_guide(self):
        """Write the files of the guide, where its commands are given."""
        page = GUIDE.read_text()
        (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        own = msgspec.toml.decode(shown)
        assert own.keys() == {"model", "fleet"}
        own["model"]["path"] = str(self.folder / "model")
        (self.folder / "node.toml").write_bytes(msgspec.toml.encode(config_of(self.folder) | own))
        for name, program in re.findall(r"\(`(\w+\.py)`\):\n\n```python\n(.*?)```", page, re.DOTALL):
            (self.folder / name).write_text(program)

    def follow_guide(self, *programs):
        """Give these commands of the guide, and return the output, which is what it shows."""
        python = Path(sys.executable).parent
        env = os.environ | {"RAY_ADDRESS": self.cluster.address, "PATH": f"{python}:{os.environ['PATH']}"}
        said = []
        for program in programs:
            ((command, shown),) = re.findall(rf"```console\n(python {program})\n(.*?)```", GUIDE.read_text(), re.DOTALL)
            done = subprocess.run(
                command.split(), cwd=self.folder, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-4000:]
            assert done.stdout == shown
            said.append(shown.rstrip())
        return said


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def actor_pid(entry):
    """The Ray worker that owns a node: above the node are guard and keeper."""
    return parent(parent(parent(entry.process.pid)))


def nothing_left(rig, name):
    """Nothing of a fleet is left but its logs and ledgers."""
    mark = f"{rig.dir}/{name}/"
    until(lambda: not marked(mark), f"processes: {marked(mark)}")
    assert not [each for each in rig.named() if each.startswith(f"{name}/")]
    assert not _groups(name)
    if not rig.named():
        until(lambda: not [*TEMPORARY.iterdir()], f"temporary files: {[*TEMPORARY.iterdir()]}")


# ---------------------------------------------------------------- the cases, in order


def case_the_guide_starts_a_fleet_and_looks_at_it(rig):
    rig.write_guide()
    assert rig.follow_guide("start.py", "look.py") == ["1.0 1.0 1.0 1.0", "rollouts-0 rollouts-1"]
    rig.fleet = attach()


def case_a_fleet_is_found_by_name_and_has_a_node_on_each_machine(rig):
    assert rig.start("rollouts", nodes=2).url == rig.fleet.url, "the same again is the same fleet"
    until(lambda: rig.backends() == [rig.url()] * 2, "each node has the engine")

    def in_a_task(fleet):
        with fleet.client() as client:
            client.submit([job("task")])
            return [outcome.reward for outcome in client.results(1)]

    assert ray.get(ray.remote(in_a_task).options(num_cpus=0).remote(rig.fleet)) == [1.0]
    machines = {actor["Address"]["NodeID"] for actor in rig.actors("FleetNode")}
    assert len(machines) == 2


def case_the_token_is_in_no_argument_log_or_open_file(rig):
    token = rig.fleet.plan.token.encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            assert token not in (place / "cmdline").read_bytes(), place
        except OSError:
            continue
    found = [path for place in (rig.dir, rig.session) for path in place.rglob("*") if path.is_file()]
    with_token = [path for path in found if token in path.read_bytes()]
    assert {path.suffix for path in with_token} == {".json"}, with_token
    assert all(path.stat().st_mode & 0o077 == 0 for path in with_token)
    assert rig.fleet.plan.token not in repr(rig.fleet) + repr(rig.fleet.plan)


def case_another_fleet_of_the_name_is_refused(rig):
    refused(lambda: rig.start("rollouts", nodes=1), ConfigError, "nodes", "attach('rollouts').shutdown()")
    refused(lambda: attach("rolouts"), ConfigError, "'rolouts'", "['rollouts']")


def case_too_few_machines_are_named_and_nothing_is_left(rig):
    start = lambda: rig.start("many", nodes=9, timeout_s=1)  # noqa: E731
    refused(start, ConfigError, "needs 9 machines", "{'CPU': 1.0}", "has 3, of which 3 have that much")
    nothing_left(rig, "many")


def case_a_node_that_cannot_start_is_told_with_its_log(rig):
    config = config_of(rig.folder) | {"model": {"path": "/no/such/model"}}
    refused(lambda: rig.start("broken", config=config), ServiceError, "broken-0", "/no/such/model")
    nothing_left(rig, "broken")


def case_a_killed_node_comes_back(rig):
    entry = rig.entries()[0]

    def strike():
        kill(entry.process.pid)
        return lambda: rig.entries()[0].process != entry.process

    rig.over("node", strike)


def case_a_killed_actor_of_a_node_takes_its_node_along(rig):
    entry = rig.entries()[1]

    def strike():
        kill(actor_pid(entry))
        return lambda: has_ended(entry.process)

    rig.over("actor", strike)


def case_a_killed_actor_of_the_head_comes_back_at_its_address(rig):
    entry = read_head(rig.dir / "rollouts/head/fleet")

    def strike():
        kill(actor_pid(entry))
        return lambda: has_ended(entry.process)

    rig.over("head", strike)


def case_a_lost_machine_is_replaced_by_another(rig):
    heads = rig.cluster.head_node.node_id
    node = next(actor for actor in rig.actors("FleetNode") if actor["Address"]["NodeID"] != heads)
    (machine,) = [each for each in rig.cluster.worker_nodes if each.node_id == node["Address"]["NodeID"]]
    (entry,) = [each for each in rig.entries() if actor_pid(each) == node["Pid"]]

    def strike():
        raylet = machine.all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()  # Ray's workers look whether it exists, and a zombie does
        return lambda: has_ended(entry.process)

    rig.over("machine", strike)
    rig.cluster.remove_node(machine, allow_graceful=False)


def case_a_restarted_engine_is_asked_again(rig):
    before = rig.url()
    rig.engine.end.options(max_task_retries=0).remote()
    until(lambda: rig.url() != before, "it is there again")
    until(lambda: rig.backends() == [rig.url()] * 2, "each node has its new address, and not the old one")
    with rig.fleet.client(session_id="engine") as client:
        client.submit([job("engine")])
        rig.finish(client, ["engine"])


def case_the_guide_ends_its_fleet(rig):
    rig.follow_guide("stop.py")
    nothing_left(rig, "rollouts")


def case_a_detached_fleet_outlives_its_driver_with_its_jobs_and_another_goes_with_it(rig):
    ray.get(rig.engine.set_held.remote(True))
    drivers = [rig.run_driver("stays", "detached"), rig.run_driver("goes", "")]
    for driver in drivers:
        assert b"SUBMITTED\n" in iter(driver.stdout.readline, b""), driver.wait()
    refused(lambda: rig.start("goes"), ConfigError, "belongs to another driver")
    for driver in drivers:
        kill(driver.pid)
    until(lambda: not [name for name in rig.named() if name.startswith("goes/")], "Ray ends the actors")
    until(lambda: not _groups("goes"), "and the placement group")
    ray.get(rig.engine.set_held.remote(False))
    with attach("stays").client(session_id="driver") as client:
        rig.finish(client, ["a", "b"])
    nothing_left(rig, "goes")
    attach("stays").shutdown(drain_s=5)
    nothing_left(rig, "stays")


def case_a_start_that_is_cut_leaves_nothing_at_ctrl_c_and_is_completed_after_a_kill(rig):
    drivers = {name: rig.run_driver(name, "detached") for name in ("cut", "killed")}
    for name in drivers:
        until(lambda name=name: marked(f"{rig.dir}/{name}/"), "the first process")
    kill(drivers["killed"].pid)
    drivers["cut"].send_signal(signal.SIGINT)
    assert drivers["cut"].wait(WITHIN_S) != 0
    nothing_left(rig, "cut")
    with rig.start("killed") as fleet:
        assert [*fleet.status()["members"]] == ["killed-0"]
    nothing_left(rig, "killed")


def refused(call, error, *parts):
    said = ""
    try:
        call()
    except error as exc:
        said = str(exc)
    assert said, "it was not refused"
    assert all(part in said for part in parts), said


class ClusterRig(Rig):
    """The rig, with drivers of its cluster in other processes."""

    def __init__(self, folder, cluster):
        super().__init__(folder, cluster)
        self.session = Path(cluster.head_node.get_session_dir_path())

    def named(self):
        """The actors of all fleets."""
        there = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in there if each["namespace"] == NAMESPACE]

    def actors(self, kind):
        """The live actors of a class: Ray's own facts of each."""
        found = ray._private.state.actors().values()
        return [each for each in found if each["ActorClassName"] == kind and each["State"] == "ALIVE"]

    def run_driver(self, name, detached):
        argv = [sys.executable, "-m", "support.ray_cluster", str(self.folder), name, detached]
        env = os.environ | {"RAY_ADDRESS": self.cluster.address}
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE)


def drive(folder, name, detached):
    """Be another driver."""
    ray.init(address="auto", log_to_driver=False)
    start_fleet(1, folder / "node.toml", name=name, backends=["vllm_server_*"], detached=bool(detached))
    gc.collect()  # the fleet of a driver does not need the object
    with attach(name).client(session_id="driver") as client:
        client.submit([job("a"), job("b")])
        say("SUBMITTED")
        time.sleep(WITHIN_S)


def main(folder):
    began = time.monotonic()
    results = {}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": SOON}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    say(f"{time.monotonic() - began:.1f} s: cluster")
    rig = ClusterRig(folder, cluster)
    for name, case in globals().copy().items():
        if name.startswith("case_"):
            try:
                case(rig)
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
                say(results[name])
            say(f"{time.monotonic() - began:.1f} s: {name}")
            (folder / "results.json").write_text(json.dumps(results))
    ray.shutdown()
    cluster.shutdown()
    say(f"{time.monotonic() - began:.1f} s: end")


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) == 2 else drive(Path(sys.argv[1]), *sys.argv[2:])
