"""A whole node behind REST over TLS: the endpoint file, a rollout in a real daemon, a pause, metrics, the drain."""

from __future__ import annotations

import os
import signal

import msgspec
import trio
import trustme

from prorl_ipc.tls import client_context
from prorl_trio.config import BackendConfig, ListenConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.node.serve import serve_node
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from support.fake_rest import TOKEN, RestService

JOB = {
    "job_id": "j",
    "group_id": "g",
    "instance": {"instance_id": "q", "handler": "math", "payload": {"question": "6*7?", "answer": "42"}},
    "sampling": {"max_output_tokens": 200},
}


async def test_a_rollout_through_rest(tmp_path):
    tiny = make_tiny_model(tmp_path / "model")
    endpoint_file = tmp_path / "endpoint.json"
    authority, ca, pair = trustme.CA(), tmp_path / "ca.pem", tmp_path / "pair.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pair))
    pair.chmod(0o600)

    def script(_prompt):
        ids = tiny.turn(r"\boxed{42}")
        return ids, [-0.5] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    with trio.fail_after(90):
        async with open_fake_engine(script=script, config=engine_config) as engine, trio.open_nursery() as nursery:
            config = NodeConfig(
                model=ModelConfig(path=str(tmp_path / "model")),
                listen=ListenConfig(
                    port=0, token=TOKEN, endpoint_file=str(endpoint_file), tls_cert=str(pair), tls_key=str(pair)
                ),
                backends=BackendConfig(urls=[engine.url]),
                sandbox=SandboxConfig(provider="process"),
            )
            await nursery.start(lambda *, task_status: serve_node(config, task_status=task_status))
            url = msgspec.json.decode(endpoint_file.read_bytes())["rest_url"]
            host, _, port = url.removeprefix("https://").rpartition(":")
            rest = RestService((host, int(port)), None, nursery.cancel_scope, client_context(str(ca)))
            assert (await rest.call("GET", "/readyz")).json() == {"ready": True, "reason": ""}
            assert (await rest.call("POST", "/v1/backends/pause", {"timeout_s": 5})).json()["paused"]
            answer = await rest.call("POST", "/v1/rollouts?wait=0.2", JOB)
            assert answer.status == 202
            assert (await rest.call("POST", "/v1/backends/resume", {"policy_version": "v2"})).status == 200
            answer = (await rest.call("GET", "/v1/rollouts/j?wait=60&arrays=list")).json()
            assert (answer["status"], answer["outcome"]["reward"]) == ("completed", 1.0), answer
            (segment,) = answer["outcome"]["trajectory"]["segments"]
            assert len(segment["token_ids"]) == len(segment["logprobs"]) == len(segment["loss_mask"])
            assert [span["policy_version"] for span in segment["spans"]] == ["v2"]
            assert b"prorl" in (await rest.call("GET", "/metrics")).body
            assert (await rest.call("GET", "/v1/status")).json()["node"]["backends"]["admission"]["paused"] is False
            os.kill(os.getpid(), signal.SIGTERM)
