"""An agent server of NeMo Gym that has a node run the rollouts."""

from __future__ import annotations

# ruff: noqa: TC002  FastAPI and pydantic read the annotations when the server starts.
import asyncio
import json
import logging
from collections import Counter
from contextlib import suppress
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from nemo_gym.base_resources_server import AggregateMetrics, AggregateMetricsRequest, BaseRunRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.global_config import get_first_server_config_dict
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import ConfigDict, Field, PrivateAttr

from prorl_trio.integrations.engines import NodeEngines
from prorl_trio.integrations.nemo_gym.answers import FAILURE_CLASS, REFUSED, answer_of, failure_of
from prorl_trio.integrations.nemo_gym.jobs import JobTemplate, RowRefused
from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.integrations.rollouts import JobRefused, Rollouts, rollouts_on
from prorl_trio.types.errors import BackendError, ConfigError, ServiceError

logger = logging.getLogger(__name__)

FIRST_VERSION: Final = 0
CLIENT_GONE: Final = 499


class ProRLTrioAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc] # NeMo Gym has no types
    """The configuration of the agent server.

    Attributes:
        node: fields of a `NodeAddress`.
        job: fields of a `JobSpec`, for all jobs.
        model_server: a model server, such as `policy_model`, whose engines become the node's backends; None: the node
            has its own.
        resources_server: the resources server of rows without a task of their own.
        on_failure: the answer for a rollout without a reward. `row`: a row with a failure class, for `gym eval run`.
            `http`: status 503, or 422 if another attempt cannot help, for NeMo RL, which then tries again.
    """

    node: dict[str, Any]
    job: dict[str, Any] = Field(default_factory=dict)
    model_server: ModelServerRef | None = None
    resources_server: ResourcesServerRef | None = None
    on_failure: Literal["row", "http"] = "row"


class ProRLTrioRunRequest(BaseRunRequest):  # type: ignore[misc] # as above
    """A row. See `RowTask` for its field `prorl`; other fields are returned unchanged."""

    model_config = ConfigDict(extra="allow")


class ProRLTrioAgent(SimpleResponsesAPIAgent):  # type: ignore[misc] # as above
    """The agent server. Each `POST /run` is one job; a client that disconnects cancels it."""

    config: ProRLTrioAgentConfig
    _template: JobTemplate = PrivateAttr()
    _node: NodeAddress = PrivateAttr()
    _engines: NodeEngines | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Check the configuration.

        Raises:
            ConfigError: it cannot be used.
        """
        super().model_post_init(context)
        server = self.config.resources_server
        self._template = JobTemplate(self.config.job, "" if server is None else server.name)
        self._node = NodeAddress.read(self.config.node)

    def setup_webserver(self) -> FastAPI:
        """Connect the model server's engines to the node, and return the application. Blocks until this is done.

        Raises:
            ConfigError: the node's token or the model server's address cannot be used.
            BackendError: an engine does not return token ids.
            ServiceError: the node does not answer, or refuses the token.
        """
        if self.config.model_server is not None:
            theirs = get_first_server_config_dict(self.server_client.global_config_dict, self.config.model_server.name)
            self._engines = engines_on(self._node, addresses_of(theirs.get("base_url")))
        return super().setup_webserver()

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Refuse: a node runs whole rollouts."""
        raise HTTPException(501, "this agent server runs whole rollouts: POST /run")

    async def run(self, request: Request, body: ProRLTrioRunRequest) -> Response:
        """Run a rollout of the row, and return a `BaseVerifyResponse`, or a failure as `on_failure` says."""
        row = json.loads(await request.body())  # exactly what was sent, whereas `body` has it with defaults
        try:
            outcome = await _unless_gone(request, rollouts_on(self._node), self._template.spec_of(row))
        except (RowRefused, JobRefused) as exc:
            return self._failure(failure_of(REFUSED, str(exc), row, terminal=True), status=422)
        except (ServiceError, ConfigError) as exc:
            raise HTTPException(503, f"{self.config.name}: {exc}") from exc
        if outcome is None:
            return Response(status_code=CLIENT_GONE)
        answer = await asyncio.to_thread(answer_of, outcome, row)
        return _json(answer) if FAILURE_CLASS not in answer else self._failure(answer, status=503)

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Return the metrics of all rollouts with a reward, and the number of failures by their class."""
        failures = Counter(each[FAILURE_CLASS] for each in body.verify_responses if FAILURE_CLASS in each)
        scored = [each for each in body.verify_responses if FAILURE_CLASS not in each]
        metrics = AggregateMetrics()
        if scored:
            metrics = await super().aggregate_metrics(AggregateMetricsRequest(verify_responses=scored))
        metrics.agent_metrics |= {f"failures/{name}": count for name, count in failures.items()}
        return metrics

    def _failure(self, answer: dict[str, Any], *, status: int) -> Response:
        logger.warning("%s: %s: %s", answer["prorl_job_id"], answer[FAILURE_CLASS], answer["error_message"])
        return _json(answer, status if self.config.on_failure == "http" else 200)


async def _unless_gone(request: Request, rollouts: Rollouts, spec: Any) -> Any:
    """Return the outcome of a job; None, with the job cancelled, if the client disconnects first."""
    rollout = asyncio.ensure_future(rollouts.run(spec))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({rollout, gone}, return_when=asyncio.FIRST_COMPLETED)
        return rollout.result() if rollout.done() else None
    finally:
        gone.cancel()
        if not rollout.done():
            rollout.cancel()
            await asyncio.wait({rollout})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(answer: dict[str, Any], status: int = 200) -> Response:
    # Lists of token ids are not validated again: that takes seconds for long rollouts.
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def engines_on(node: NodeAddress, addresses: list[str]) -> NodeEngines:
    """Make engines the node's only backends, and keep them registered. The node keeps what it has if one is refused.

    Raises:
        BackendError: an engine does not return token ids.
        ServiceError: the node does not answer, or refuses the token.
    """
    client, added = node.connect_blocking(), list[str]()
    try:
        present = client.list_backends().urls
        for url in (f"http://{address}" for address in addresses):
            if url not in present:
                client.add_backend(url)
                added.append(url)
    except BaseException:
        with client, suppress(ServiceError, BackendError):
            for url in added:
                client.remove_backend(url)
        raise
    engines = NodeEngines(client)
    engines.register(addresses, FIRST_VERSION)
    return engines


def addresses_of(base_url: Any) -> list[str]:
    """Return `HOST:PORT` of each engine of a model server.

    Raises:
        ConfigError: the model server has no engines with an address of their own.
    """
    urls = [base_url] if isinstance(base_url, str) else list(base_url or [])
    parts = [urlsplit(url) for url in urls]
    if not parts or any(part.scheme != "http" or not part.netloc for part in parts):
        raise ConfigError(
            f"model_server: its base_url {urls} is no list of http://HOST:PORT/v1. Use a vllm_model, or omit "
            "model_server and add backends to the node"
        )
    return [part.netloc for part in parts]
