"""A trainer of the ProRL Agent server as it is: its own engine, its requests in their order, no token."""

from __future__ import annotations

import os
import signal
from functools import partial

import msgspec
import pytest
import trio

from prorl_trio.config import (
    BackendConfig,
    FleetConfig,
    HeadConfig,
    LedgerConfig,
    ListenConfig,
    ModelConfig,
    NodeConfig,
    RestConfig,
    SandboxConfig,
)
from prorl_trio.fleet.serve import serve_fleet
from prorl_trio.node.serve import serve_node
from prorl_trio.testing.fake_engine import FakeEngineConfig
from prorl_trio.testing.fake_trainer_engine import open_fake_trainer_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from support.fake_rest import RestService

SAMPLING = {
    "model": "hosted_vllm/Qwen/Qwen3-8B",
    "api_key": "dummy_key",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_iterations": 35,
    "max_output_tokens": 200,
    "token_level_generation": True,
    "custom_tokenizer": "Qwen/Qwen3-8B",
    "max_model_len": 4000,
}
INSTANCE = {
    "data_source": "deepscaler",
    "instance_id": "aime-1",
    "trajectory_id": 3,
    "prompt": msgspec.json.encode([{"role": "user", "content": "What is 6 * 7?"}]).decode(),
    "reward_model": {"ground_truth": "42", "style": "rule"},
}
CALL = '<tool_call>\n{"name": "ipython", "arguments": {"code": "6 * 7"}}\n</tool_call>'


@pytest.mark.parametrize("served", ["node", "fleet"])
async def test_a_batch_as_its_trainers_run_one(tmp_path, served):
    tiny = make_tiny_model(tmp_path / "model")
    endpoint_file = tmp_path / "endpoint.json"

    def script(prompt):
        ids = tiny.turn(r"\boxed{42}" if "42" in tiny.decode(prompt) else f"I calculate.\n{CALL}")
        return ids, [-0.5] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with trio.open_nursery() as nursery, open_fake_trainer_engine(script=script, config=engine_config) as engine:
        with trio.fail_after(90):
            model = ModelConfig(path=str(tmp_path / "model"))
            listen = ListenConfig(port=0, token="never sent", endpoint_file=str(endpoint_file))
            rest = RestConfig(prorl_compat=True, prorl_compat_token=False)
            config = NodeConfig(
                model=model,
                listen=listen,
                rest=rest,
                backends=BackendConfig(max_model_len=4000),
                sandbox=SandboxConfig(provider="process"),
            )
            if served == "fleet":
                fleet, shown = FleetConfig(dir=str(tmp_path / "fleet")), RestConfig(prorl_compat=True)
                behind = msgspec.structs.replace(listen, endpoint_file="", unix_socket="")
                config = msgspec.structs.replace(config, fleet=fleet, rest=RestConfig(), listen=behind)
                ledger = LedgerConfig(dir="")
                head = HeadConfig(fleet=fleet, model=model, listen=listen, rest=shown, ledger=ledger)
                await nursery.start(lambda *, task_status: serve_fleet(head, task_status=task_status))
            await nursery.start(lambda *, task_status: serve_node(config, task_status=task_status))
            host, _, port = (
                msgspec.json.decode(endpoint_file.read_bytes())["rest_url"].removeprefix("http://").rpartition(":")
            )
            server = RestService((host, int(port)), None, nursery.cancel_scope)

            key = "Bearer never sent" if served == "fleet" else ""

            async def call(method, path, body=None):
                answer = await server.call(method, path, body, headers={"Authorization": key})
                assert answer.status == 200, (path, answer.body)
                return answer.json()

            await call("POST", "/clear_llm_server")
            add = partial(server.call, "POST", "/add_llm_server", headers={"Authorization": key})
            while (await add({"address": engine.url})).status != 200:
                assert served == "fleet", "the head waits for its node"
                await trio.sleep(0.1)
            await call("POST", "/start")
            results = [None, None]

            async def process(index):
                request = {"instance": INSTANCE, "sampling_params": SAMPLING, "job_id": f"aime-1-{index}"}
                results[index] = await call("POST", "/process", request)

            async with trio.open_nursery() as asking:
                for index in range(len(results)):
                    asking.start_soon(process, index)
            status = await call("GET", "/status")
            assert (status["running"], status["jobs"]) == (True, 0)
            await call("POST", "/stop")
            if served == "fleet":  # a signal would reach but one of the two servers of this process
                nursery.cancel_scope.cancel()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
    for result in results:
        assert (result["resolved"], result["filter"], result["critical_error"]) == (True, False, None), result
        messages = result["messages"]
        assert [each["role"] for each in messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert messages[2]["content"] == "I calculate."
        assert messages[2]["tool_calls"] == [{"name": "ipython", "arguments": '{"code":"6 * 7"}'}]
        assert messages[3]["content"] == "42"
        # As its trainers put a sequence together: everything before the first answer, then message by message.
        sequence = [token for each in messages for token in each["token_ids"]]
        assert messages[4]["input_ids"] + messages[4]["token_ids"] == sequence
        assert tiny.decode(messages[4]["input_ids"]).count("<|im_start|>assistant") == 2
        assert len(messages[4]["logprobs"]) == len(messages[4]["token_ids"])
        assert {tool["function"]["name"] for tool in result["tools"]} == {"ipython", "finish"}
