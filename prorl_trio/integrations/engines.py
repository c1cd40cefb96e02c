"""A trainer's rollout servers as a node's backends: registered, paused while weights change, versioned by the step.

Plain calls on a `BlockingClient`, and one thread that watches for node restarts.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from prorl_trio.types.errors import BackendError, ServiceError, UpdateRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.client.blocking import BlockingClient, BlockingPolicyUpdate

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 2.0
"""Interval in seconds between checks that the node still knows the engines. A restarted node has forgotten them."""
JOIN_TIMEOUT_S: Final = 10.0
MAX_TRAINING_S: Final = 24 * 3600.0
"""Maximum duration of an update in seconds. Where engines and trainer share GPUs, training is part of it."""


class NodeEngines:
    """The engines of one trainer on one node. The node gives their tokens the version `str(step)`.

    All methods block, and belong to one thread. Other backends of the node are removed, because a node has one policy.

    Args:
        client: its own session. It is closed together with this object.
        timeout_s: limit for a pause, in seconds.
        check_interval_s: see `CHECK_INTERVAL_S`.
    """

    def __init__(
        self, client: BlockingClient, *, timeout_s: float = 600.0, check_interval_s: float = CHECK_INTERVAL_S
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._check_interval_s = check_interval_s
        self._urls: list[str] = []
        self._step = 0
        self._update: BlockingPolicyUpdate | None = None
        self._updating_to = 0
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._keep_registered, name="prorl-trio engines", daemon=True)

    def register(self, addresses: Sequence[str], step: int) -> None:
        """Register these engines, which have the weights of `step`, and remove all other engines from the node.

        Args:
            addresses: `HOST:PORT` of each engine, as `LLMServerManager.get_addresses` returns them, seen from the node.
            step: see above.

        Raises:
            BackendError: an engine failed the node's probe; the message contains the reason.
            ServiceError: the session is over.
        """
        with self._turn:
            self._urls = [f"http://{address}" for address in addresses]
            self._step = step
            self._open()
        self._watch.start()

    def begin_update(self, step: int) -> None:
        """Hold back all completions, because the engines may now lose their weights. Further calls do nothing.

        Completions in flight are aborted. When the update is finished, they continue from the tokens received so far.

        Raises:
            PolicyUpdateFailed: an engine could not be paused; nothing has changed.
            ServiceError: the pause took too long, and nothing has changed; or the session is over.
        """
        if self._update is not None:
            return
        update = self._client.policy_update(
            str(step), mode="abort", timeout_s=self._timeout_s, max_idle_s=MAX_TRAINING_S
        )
        with self._turn:
            update.__enter__()
            self._update, self._updating_to = update, step

    def finish_update(self) -> None:
        """Resume completions: the engines have the weights of the step that the update was begun for.

        Raises:
            ServiceError: the session is over.
        """
        if self._update is None:
            return
        with self._turn:
            update, self._update = self._update, None
            self._step = step = self._updating_to
            try:
                update.__exit__(None, None, None)
            except UpdateRefused as exc:  # the node was restarted and knows of no update
                logger.warning("the engines have the weights of step %d, and the node is told so again: %s", step, exc)
                self._open()

    def close(self) -> None:
        """Close the session. The node keeps the engines."""
        self._closing.set()
        if self._watch.is_alive():
            self._watch.join(JOIN_TIMEOUT_S)
        self._client.close()

    def _open(self) -> None:
        for url in set(self._client.list_backends().urls) - set(self._urls):
            self._client.remove_backend(url)
        # The version first: the first completions of a new engine must already have it.
        self._client.resume(str(self._step))
        for url in self._missing():
            self._client.add_backend(url)

    def _missing(self) -> list[str]:
        there = self._client.list_backends().urls
        return [url for url in self._urls if url not in there]

    def _keep_registered(self) -> None:
        while not self._closing.wait(self._check_interval_s):
            with self._turn:
                try:
                    if self._update is None and (missing := self._missing()):
                        logger.warning("the node has forgotten %s: it was started again", ", ".join(missing))
                        self._open()
                except (ServiceError, BackendError) as exc:
                    logger.warning("the node's backends cannot be looked after now: %s", exc)
