"""Run by the Python of NeMo Gym: `... ROLLOUTS ENDPOINT_FILE LOST_ROW MODEL_SERVERS`.

Its own models read the rollouts, and NeMo RL's rule holds. Then agent servers in this process get rows that fail. The
last line of the output is JSON with what came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from httpx2 import ASGITransport, AsyncClient
from nemo_gym.base_resources_server import BaseVerifyResponse
from nemo_gym.openai_utils import (
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseReasoningItemForTraining,
)
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from prorl_trio.integrations.nemo_gym.agent import ProRLTrioAgent, ProRLTrioAgentConfig
from prorl_trio.integrations.rollouts import close_all
from prorl_trio.types.errors import BackendError, ConfigError

TRAINED = (
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseReasoningItemForTraining,
)


def check(rollout):
    """As `nemo_rl.environments.nemo_gym` makes a message log of a result: prompts must be contiguous."""
    parsed = BaseVerifyResponse.model_validate(rollout)
    items = [item for item in parsed.response.output if isinstance(item, TRAINED)]
    given = [item for item in rollout["response"]["output"] if item.get("generation_token_ids")]
    assert [item.generation_token_ids for item in items] == [item["generation_token_ids"] for item in given]
    seen: list[int] = []
    for item in items:
        assert seen == item.prompt_token_ids[: len(seen)], "Non-contiguous messages found!"
        assert len(item.generation_log_probs) == len(item.generation_token_ids) > 0
        seen = [*item.prompt_token_ids, *item.generation_token_ids]
    assert seen, "NeMo Gym returned a result with no generation data."
    return len(items), sum(len(item.generation_token_ids) for item in items)


def agent(endpoint, **fields):
    """The agent server, in this process."""
    node = {"endpoint_file": endpoint, "connect_timeout_s": 2} | fields.pop("node", {})
    config = ProRLTrioAgentConfig(
        name="ours",
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        node=node,
        job={"retry": {"max_attempts": 1}},
        **fields,
    )
    models = {name: {"responses_api_models": {"vllm_model": {"base_url": url}}} for name, url in MODELS.items()}
    client = ServerClient.model_construct(global_config_dict=OmegaConf.create(models))
    return ProRLTrioAgent(config=config, server_client=client)


async def post(server, row, path="/run"):
    app = server.setup_webserver()
    async with AsyncClient(transport=ASGITransport(app), base_url="http://gym") as client:
        answer = await client.post(path, json=row, timeout=60)
    return answer.status_code, answer.json()


async def faults(endpoint, lost):
    """What careless users and a dead server get."""
    bare = {"responses_create_params": {"input": "What now?"}}
    strict = agent(endpoint, on_failure="http")
    found = {
        "bare": await post(strict, bare),
        "lost": await post(strict, lost),
        "malformed": await post(strict, {"responses_create_params": {"input": "", "no such": 1}}),
        "responses": await post(strict, {"input": "What?"}, "/v1/responses"),
        "nothing listens": await post(agent(endpoint, node={"endpoint_file": None, "url": "ws://127.0.0.1:1"}), lost),
        "wrong scheme": await post(agent(endpoint, node={"endpoint_file": None, "url": "http://127.0.0.1:1"}), lost),
        "only failures": await post(strict, {"verify_responses": [found_of(lost)]}, "/aggregate_metrics"),
    }
    os.environ["PRORL_TOKEN"] = "another-token-0123456789-0123456789"
    found["wrong token"] = await post(agent(endpoint, node={"reconnect_timeout_s": 1801}), lost)
    return found


def found_of(row):
    return {**row, "reward": None, "_ng_task_index": 0, "_ng_failure_class": "node"}


def model_servers(endpoint):
    """Whether each model server's engines become the node's, or why not."""
    found = {}
    for name in MODELS:
        try:
            agent(endpoint, model_server={"type": "responses_api_models", "name": name}).setup_webserver()
            found[name] = "registered"
        except (BackendError, ConfigError) as exc:
            found[name] = f"{type(exc).__name__}: {exc}"
    return found


if __name__ == "__main__":
    rollouts, endpoint, lost, MODELS = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    checked = [check(json.loads(line)) for line in Path(rollouts).read_text().splitlines()]
    result = {"checked": checked, "models": model_servers(endpoint), "faults": asyncio.run(faults(endpoint, lost))}
    close_all()
    sys.stdout.write(json.dumps(result) + "\n")
