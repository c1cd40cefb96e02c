"""Pulls for a node: a missing image is pulled once, for all callers that wait for it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.portable_text import printable
from prorl_trio.sandbox.images.names import DOCKER
from prorl_trio.sandbox.images.pull import PullOrder, PullReport, PullRules
from prorl_trio.sandbox.images.store import find_image
from prorl_trio.sandbox.runtime.interpreter import own_python
from prorl_trio.supervision import contained
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_MAX_SAID_BYTES: Final = 64 * 1024
"""Limit of the stored output of a pull process, which is a single line."""
_KILL_GRACE_S: Final = 5.0


class PullLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a node's pulls.

    Attributes:
        rules: limits of each pull.
        max_concurrent: images that are pulled concurrently.
        timeout_s: how long a caller waits for an image. The pull itself continues.
    """

    rules: PullRules = PullRules()
    max_concurrent: int = 4
    timeout_s: float = 3600.0


class _Pull:
    """A running pull: its end, and the reason of a failure."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.report = PullReport()
        self.refused: SandboxUnavailable | None = None


class ImagePuller:
    """Pulls images in separate processes, one for each image, as tasks of `nursery`.

    A pull belongs to the node: it continues when all waiting callers were cancelled, and ends with `nursery`.
    """

    def __init__(self, limits: PullLimits, nursery: trio.Nursery) -> None:
        self._limits = limits
        self._nursery = nursery
        self._places = trio.CapacityLimiter(limits.max_concurrent)
        self._pulls: dict[str, _Pull] = {}
        self._pulled_total = 0
        self._failed_total = 0

    def __repr__(self) -> str:
        return f"<ImagePuller: {len(self._pulls)} pulls, {self._pulled_total} done, {self._failed_total} failed>"

    def statistics(self) -> dict[str, float]:
        """Return current numbers, and `*_total` since the beginning. `image_pulls` includes waiting pulls."""
        return {
            "image_pulls": len(self._pulls),
            "images_pulled_total": self._pulled_total,
            "image_pulls_failed_total": self._failed_total,
        }

    async def wait_image(self, image: str) -> None:
        """Return when `image` is stored; at once unless it is a registry's. A cancel does not stop the pull.

        Raises:
            SandboxUnavailable: it could not be pulled, or not within `timeout_s`.
        """
        await trio.lowlevel.checkpoint()
        if not image.startswith(DOCKER) or await run_blocking(find_image, image) is not None:
            return
        pull = self._pulls.get(image)
        if pull is None:
            pull = self._pulls[image] = _Pull()
            self._nursery.start_soon(contained(self._pull, "a pull"), image, pull, name=f"pull of {image}")
        with trio.move_on_after(self._limits.timeout_s):
            await pull.done.wait()
            if pull.refused is not None:
                raise pull.refused
            if pull.report.error:
                raise SandboxUnavailable(pull.report.error)
            return
        raise SandboxUnavailable(
            f"image {image} was not pulled within {self._limits.timeout_s:g} s; the pull goes on. Pull large images "
            "beforehand: `prorl-trio image pull`",
            retryable=True,
        )

    async def _pull(self, image: str, pull: _Pull) -> None:
        try:
            async with self._places:
                logger.info("image %s is pulled", image)
                order = PullOrder(reference=image, rules=self._limits.rules)
                pull.report = await run_pull(order, lambda line: logger.info("image %s: %s", image, line))
        except Exception as exc:
            what = f"image {image} was not pulled, because its process cannot be started"
            pull.refused = SandboxUnavailable.of(what, exc)
            pull.report = PullReport(error=str(pull.refused))
        finally:
            del self._pulls[image]
            pull.done.set()
        if pull.report.error:
            self._failed_total += 1
            logger.warning("%s", pull.report.error)
        else:
            self._pulled_total += 1


async def run_pull(order: PullOrder, progress: Callable[[str], None]) -> PullReport:
    """Run a pull process to its end, and call `progress` with each line of its progress.

    A cancel kills the process; downloaded data stays.
    """
    argv = [own_python(), "-m", "prorl_trio.sandbox.images.pull"]
    pipe = subprocess.PIPE
    process = await trio.lowlevel.open_process(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, cwd="/"
    )
    said: dict[str, bytes] = {}
    try:
        # Its input stays open: it ends when the input closes, as when this process is killed.
        async with open_single_nursery() as nursery:
            nursery.start_soon(_read, process.stdout, said, "out")
            nursery.start_soon(_read, process.stderr, said, "err", progress)
            if process.stdin is not None:
                try:
                    await process.stdin.send_all(msgspec.json.encode(order) + b"\n")
                except trio.BrokenResourceError:
                    logger.warning("the process of a pull has ended before it was told what to pull")
        await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(_KILL_GRACE_S, shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    await stream.aclose()
    try:
        return msgspec.json.decode(said["out"], type=PullReport)
    except msgspec.DecodeError:
        last = said["err"].decode(errors="replace").strip().splitlines()[-1:]
        return PullReport(
            error=f"image {order.reference} was not pulled: its process ended with exit code {process.returncode}, and "
            f"said: {last}"
        )


async def _read(
    stream: trio.abc.ReceiveStream | None,
    said: dict[str, bytes],
    name: str,
    progress: Callable[[str], None] = lambda _line: None,
) -> None:
    said[name] = line = b""
    if stream is not None:
        async for data in stream:
            said[name] = (said[name] + data)[-_MAX_SAID_BYTES:]
            *lines, line = (line + data)[-_MAX_SAID_BYTES:].split(b"\n")
            for each in lines:
                progress(printable(each.decode(errors="replace")))
