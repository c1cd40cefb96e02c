"""Sandboxes that outlive the task that opened them: opened in one stage, used in another, closed in a third.

Some are started in advance, as `warm_pool` plans, so that callers rarely wait for a start. Each is used once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec
import trio

from prorl_ipc.nursery import leaves, single_exception
from prorl_trio.sandbox.images.locate import HOST, locate_root
from prorl_trio.sandbox.images.puller import ImagePuller
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.run_dir import remains_count
from prorl_trio.sandbox.sandbox import Sandbox
from prorl_trio.sandbox.warm_pool import WarmLimits, WarmPool
from prorl_trio.supervision import contained, service_task
from prorl_trio.threads import run_blocking
from prorl_trio.types.errors import InternalError, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prorl_ipc.sandbox_calls import SandboxCall
    from prorl_trio.sandbox.images.puller import PullLimits
    from prorl_trio.sandbox.program import OnOutput
    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.sandbox.use import Use


Start = Literal["cold", "warm"]
"""How a sandbox was started: while a caller waited for it, or in advance."""
OnOpen = Callable[[str, Start, float], None]
"""Called with the provider's name, how the sandbox was started, and the seconds a caller waited for it, gates included.
Must not raise."""
InLine = Callable[[str], AbstractContextManager[None]]
"""Returns the block in which a caller waits, with the given reason, while starts are paused."""

MAX_START_ATTEMPTS: Final = 3
START_BACKOFF_S: Final = 0.25
"""Delay before the second attempt; doubled before each later one."""

MAX_PAUSE_S: Final = 3600.0
"""Longest time that a caller waits for paused starts, before its start fails."""
MAX_REFUSALS: Final = 5
"""Limit of failed starts for one caller while trial starts succeed, since its request may be the cause."""
TRIAL_DELAY_S: Final = 1.0
"""Delay between the first two trial starts of a pause; doubled each time, up to `MAX_TRIAL_DELAY_S`."""
MAX_TRIAL_DELAY_S: Final = 30.0

CLOSE_TIMEOUT_S: Final = 20.0
"""Longest wait of `aclose`, longer than a provider may take to end a sandbox."""

HEALTH_TIMEOUT_S: Final = 0.5
"""Time limit for a warm sandbox to answer before it is handed out. A slower one is discarded."""


T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


class StartGates:
    """A gate for the image, then the gate of the node, so that a busy image does not delay other images. FIFO.

    A circuit breaker closes all gates while the machine cannot start any sandbox.

    Attributes:
        paused: why no start is admitted now; empty if starts are.
        pauses_total: number of times that the gates were closed.
    """

    def __init__(self, max_concurrent_starts: int, max_concurrent_starts_per_image: int) -> None:
        self._node = trio.CapacityLimiter(max_concurrent_starts)
        self._per_image = max_concurrent_starts_per_image
        self._images: dict[str, trio.CapacityLimiter] = {}
        self.paused = ""
        self.pauses_total = 0
        self._paused_since_s = 0.0
        self._resumed = trio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        return f"<StartGates: {self.starting} of {self._node.total_tokens} starting, {len(self._images)} images>"

    @property
    def starting(self) -> int:
        return self._node.borrowed_tokens

    @property
    def images(self) -> frozenset[str]:
        return frozenset(self._images)

    def close(self, reason: str) -> None:
        """Admit no start until `open`. Logs the reason, once for each pause."""
        if not self.paused:
            self._resumed = trio.Event()
            self._paused_since_s = trio.current_time()
            self.pauses_total += 1
            logger.error("no sandbox can be started; starts pause until a trial start succeeds: %s", reason)
        self.paused = reason

    def open(self) -> None:
        """Admit starts again. Calling it again has no effect."""
        if self.paused:
            paused_s = trio.current_time() - self._paused_since_s
            logger.warning("sandboxes can be started again, after a pause of %.0f s", paused_s)
        self.paused = ""
        self._resumed.set()

    async def wait_resumed(self) -> None:
        await self._resumed.wait()

    @asynccontextmanager
    async def enter(self, image: str) -> AsyncIterator[None]:
        """Wait for both gates; the block is one start. If cancelled, no place is taken."""
        gate = self._images.setdefault(image, trio.CapacityLimiter(self._per_image))
        try:
            async with gate, self._node:
                yield
        finally:
            statistics = gate.statistics()
            unused = statistics.borrowed_tokens == 0 and statistics.tasks_waiting == 0
            if unused and self._images.get(image) is gate:
                del self._images[image]


class HostedSandbox(Sandbox):
    """A live sandbox whose owner is a task of the host. Any task may use it; the last user calls `aclose`."""

    def __init__(self, sandbox: Sandbox, on_overdue: Callable[[], None]) -> None:
        super().__init__(sandbox.sandbox_id)
        self._sandbox = sandbox
        self._on_overdue = on_overdue
        self.use: Use | None = None
        """Set when a rollout owns it."""
        self._closing = trio.Event()
        self._gone = trio.Event()

    def __repr__(self) -> str:
        state = "gone" if self._gone.is_set() else "closing" if self._closing.is_set() else "live"
        return f"<HostedSandbox {self.sandbox_id}: {state}>"

    async def call(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        with self.use.calling(request) if self.use is not None else nullcontext():
            return await self._sandbox.call(request, reply_type, timeout_s, on_output)

    @property
    def is_used(self) -> bool:
        return bool(self.use)

    def _timing(self, *, runs: bool) -> AbstractContextManager[None]:
        return self.use.timing(runs=runs) if self.use is not None else nullcontext()

    async def wait_lost(self) -> None:
        await self._sandbox.wait_lost()

    async def open_port(self, port: int = 0) -> trio.SocketListener:
        return await self._sandbox.open_port(port)

    def on_standstill(self, uncount: Callable[[float], None]) -> None:
        self._sandbox.on_standstill(uncount)

    @property
    def gone(self) -> bool:
        """Return whether it is completely removed, or the provider has taken over the rest."""
        return self._gone.is_set()

    async def aclose(self) -> None:
        """End the sandbox and return when it is removed. Idempotent; an action in flight raises `SandboxLost`.

        Shielded; a cancellation is delivered afterwards. An end that takes more than `CLOSE_TIMEOUT_S` continues in the
        background: it is logged and counted, and `gone` is False.
        """
        self._closing.set()
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._gone.wait()
        if not self.gone:
            logger.error(
                "sandbox %s has not closed in %g s; the host goes on with it", self.sandbox_id, CLOSE_TIMEOUT_S
            )
            self._on_overdue()
        await trio.lowlevel.checkpoint_if_cancelled()


class SandboxHost:
    """The owner of sandboxes, with one task each. `open_sandbox_host` creates it."""

    def __init__(
        self,
        provider: SandboxProvider,
        nursery: trio.Nursery,
        gates: StartGates,
        pool: WarmPool[HostedSandbox],
        on_open: OnOpen | None = None,
        puller: ImagePuller | None = None,
    ) -> None:
        self._provider = provider
        self.has_layers = provider.has_layers
        self._puller = puller
        self._nursery = nursery
        self._gates = gates
        self._pool = pool
        self._on_open = on_open
        self._pool_changed = trio.Event()
        self._in_use: set[HostedSandbox] = set()
        self._starting = 0
        self._started_total = 0
        self._start_seconds_total = 0.0
        self._failed_total = 0
        self._warm_taken_total = 0
        self._warm_dead_total = 0
        self._warm_evicted_total = 0
        self._overdue_total = 0
        self._proven: SandboxSpec | None = None
        """A specification that has started here: if it no longer does, the machine is the cause."""
        self._doubted = SandboxSpec()
        """The specification of the latest failed start."""
        self._doubt = trio.Event()
        self._verdict = trio.Event()
        self._entered_total = 0
        """Number of successful starts, including trials."""

    @property
    def why_paused(self) -> str:
        """Return why sandboxes cannot be started now; empty if they can."""
        return self._gates.paused

    def statistics(self) -> dict[str, float]:
        """Return current numbers, and `*_total` since the beginning.

        `live` sandboxes are in use and `warm` ones wait for their first user. `starting` includes starts that wait for
        a gate, and starts in advance. `warm_dead_total` died, or did not answer, before their first use.
        `close_overdue_total` took more than `CLOSE_TIMEOUT_S` to close; `remains` of these are still being removed.
        `starts_paused` is 1 while the machine cannot start any.
        """
        return {
            "live": len(self._in_use),
            "starting": self._starting,
            "warm": self._pool.idle_count,
            "started_total": self._started_total,
            "start_seconds_total": round(self._start_seconds_total, 6),
            "failed_total": self._failed_total,
            "starts_paused": int(bool(self._gates.paused)),
            "start_pauses_total": self._gates.pauses_total,
            "warm_taken_total": self._warm_taken_total,
            "warm_dead_total": self._warm_dead_total,
            "warm_evicted_total": self._warm_evicted_total,
            "close_overdue_total": self._overdue_total,
            "remains": remains_count(),
            **({} if self._puller is None else self._puller.statistics()),
        }

    async def wait_image(self, image: str) -> None:
        """Return when sandboxes of `image` can be started: a registry's image that is not in the store is pulled.

        `open` does so as well. Call this first to exclude the time of a pull from the time of the start.

        Raises:
            SandboxUnavailable: it could not be pulled.
        """
        if self._puller is None:
            await trio.lowlevel.checkpoint()
        else:
            await self._puller.wait_image(image)

    async def open(self, spec: SandboxSpec, in_line: InLine = lambda _what: nullcontext()) -> HostedSandbox:
        """Return an unused sandbox: a warm one that answers, or a new one.

        It lives until `aclose`, or the host's end. A new one first waits for the start gates, and is retried a few
        times if its failure is `retryable`. While the machine cannot start any, this waits for up to `MAX_PAUSE_S`, in
        a block of `in_line`. A cancelled call leaves nothing behind.

        Raises:
            SandboxUnavailable: see `SandboxProvider.open_sandbox`. All other errors of a start are converted to it.
        """
        key, began_s = msgspec.json.encode(spec, order="deterministic"), trio.current_time()
        start: Start = "warm"
        try:
            hosted = await self._take_warm(key, spec.image)
            if hosted is None:
                start = "cold"
                hosted = await self._open_new(key, spec, in_line)
            if self._on_open is not None:
                self._on_open(self._provider.serving(spec).name, start, trio.current_time() - began_s)
            return hosted
        finally:
            self._pool_changed.set()  # only now: a start in advance must not slow down an awaited one

    async def _open_new(self, key: bytes, spec: SandboxSpec, in_line: InLine) -> HostedSandbox:
        refusals = 0
        own = contained(self._own_new, "the owner of a sandbox")
        while True:
            await self._wait_resumed(in_line)
            before = self._entered_total
            try:
                hosted: HostedSandbox = await self._nursery.start(own, key, spec, name="sandbox owner")
            except SandboxUnavailable as exc:
                refusal = exc
            else:
                return hosted
            if self._gates.paused or await self._is_machines(refusal, spec, before):
                continue
            refusals += 1
            if not refusal.of_machine or refusals >= MAX_REFUSALS:
                raise refusal

    async def _wait_resumed(self, in_line: InLine) -> None:
        await trio.lowlevel.checkpoint()
        if reason := self._gates.paused:
            with in_line("sandbox starts, which are paused"), trio.move_on_after(MAX_PAUSE_S) as patience:
                await self._gates.wait_resumed()
            if patience.cancelled_caught:
                raise SandboxUnavailable(
                    f"no sandbox could be started for {MAX_PAUSE_S:g} s: {self._gates.paused or reason}",
                    of_machine=True,
                )

    async def _is_machines(self, failure: SandboxUnavailable, spec: SandboxSpec, before: int) -> bool:
        """Return whether the machine, and not `spec`, caused a failed start.

        It did if no start has succeeded since there were `before` successful starts, and a trial start fails as well.
        """
        if self._entered_total > before or not self._raise_doubt(failure, spec):
            await trio.lowlevel.checkpoint()
            return False
        await self._verdict.wait()
        return bool(self._gates.paused)

    def _raise_doubt(self, failure: SandboxUnavailable, spec: SandboxSpec) -> bool:
        """Request a trial start, if it could prove anything."""
        if self._proven is None and not failure.of_machine:
            return False
        self._doubted = spec
        if not self._doubt.is_set():
            self._doubt.set()
            self._verdict = trio.Event()
        return True

    async def _try_starts(self) -> None:
        """After each failed start, test whether the machine can start any sandbox. While it cannot, starts pause."""
        if not self.why_paused:
            await self._doubt.wait()
        delay_s = TRIAL_DELAY_S
        while problem := await self._find_problem():
            self._gates.close(problem)
            self._verdict.set()
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_TRIAL_DELAY_S)
        self._gates.open()
        self._verdict.set()
        self._doubt = trio.Event()

    async def _watch_starts(self) -> None:
        while True:
            await self._try_starts()

    async def _find_problem(self) -> str:
        """Start and end a sandbox; return the reason if the machine cannot start any, else an empty string."""
        proven = self._proven
        try:
            if proven is not None and proven.image != HOST:
                await run_blocking(locate_root, proven.image)
        except SandboxUnavailable:  # that image has been removed since, which proves nothing
            proven = self._proven = None
        except (OSError, RuntimeError) as exc:
            return f"images cannot be looked at: {exc}"
        try:
            async with AsyncExitStack() as stack:
                await self._enter(proven or self._doubted, stack)
        except SandboxUnavailable as exc:
            return str(exc) if proven is not None or exc.of_machine else ""
        return ""

    async def _enter(self, spec: SandboxSpec, stack: AsyncExitStack) -> Sandbox:
        """Start a sandbox into `stack`. Every error of a start becomes `SandboxUnavailable`."""
        try:
            sandbox = await stack.enter_async_context(self._provider.open_sandbox(spec))
        except Exception as exc:
            if any(isinstance(leaf, InternalError) for leaf in leaves(exc)):
                raise
            unavailable = SandboxUnavailable.of("a sandbox cannot be started", exc)
            if unavailable is exc:
                raise
            if not unavailable.of_machine:
                logger.error("a sandbox cannot be started", exc_info=exc)
            raise unavailable from exc
        self._entered_total += 1
        if not spec.layers and (self._proven is None or spec.image == HOST or self._proven.image != HOST):
            self._proven = spec
        return sandbox

    async def wait_stocked(self) -> None:
        """Return when no start in advance is in progress or due. For measurements, or to fill the stock beforehand."""
        await trio.lowlevel.checkpoint()
        if self._pool.limits.max_warm > 0:
            while self._pool_changed.is_set() or self._pool.starting_count > 0:
                await self._pool_changed.wait()

    async def _take_warm(self, key: bytes, image: str) -> HostedSandbox | None:
        hosted = self._pool.take(key, image, trio.current_time())
        while hosted is not None:
            if await self._is_well(hosted):
                self._warm_taken_total += 1
                self._in_use.add(hosted)
                return hosted
            hosted = self._pool.take_another(key)
        return None

    async def _is_well(self, hosted: HostedSandbox) -> bool:
        """Return whether it answers. If not, or if this is cancelled, it ends in the background."""
        well = False
        try:
            with trio.move_on_after(HEALTH_TIMEOUT_S):
                await hosted.ping()
                well = True
        except SandboxLost as exc:
            logger.warning("a warm sandbox died before it was used: %s", exc)
        finally:
            if not well:
                hosted._closing.set()
        self._warm_dead_total += not well
        return well

    async def _own_new(self, key: bytes, spec: SandboxSpec, *, task_status: trio.TaskStatus[HostedSandbox]) -> None:
        def hand_out(hosted: HostedSandbox, start_s: float) -> None:
            self._pool.measured(key, start_s)
            self._in_use.add(hosted)
            task_status.started(hosted)

        await self._own(spec, MAX_START_ATTEMPTS, hand_out)

    async def _own_warm(self, key: bytes) -> None:
        spec = msgspec.json.decode(key, type=SandboxSpec)
        in_stock = False

        def put_in_stock(hosted: HostedSandbox, start_s: float) -> None:
            nonlocal in_stock
            in_stock = True
            self._pool.started(key, hosted, start_s, trio.current_time())
            self._pool_changed.set()
            nursery.start_soon(self._replace_when_lost, key, hosted)

        try:
            with single_exception():
                async with trio.open_nursery() as nursery:
                    await self._gates.wait_resumed()
                    await self._own(spec, 1, put_in_stock)
                    nursery.cancel_scope.cancel()
        except SandboxUnavailable as exc:
            logger.warning("a sandbox could not be started in advance: %s", exc)
            self._raise_doubt(exc, spec)
        finally:
            if not in_stock:
                self._pool.failed(key, trio.current_time())
                self._pool_changed.set()

    async def _replace_when_lost(self, key: bytes, hosted: HostedSandbox) -> None:
        """If it dies in stock, end it and have another one started. A user would notice by itself."""
        await hosted.wait_lost()
        if self._pool.died(key, hosted, trio.current_time()):
            logger.warning("the warm sandbox %s died while it waited for its first user", hosted.sandbox_id)
            self._warm_dead_total += 1
            hosted._closing.set()
            self._pool_changed.set()

    async def _own(
        self, spec: SandboxSpec, max_attempts: int, give_away: Callable[[HostedSandbox, float], None]
    ) -> None:
        """Own a sandbox from its start to its end. `give_away(hosted, start_s)` is called when it is live."""
        hosted: HostedSandbox | None = None
        try:
            async with AsyncExitStack() as stack:
                await self.wait_image(spec.image)
                sandbox, start_s = await self._start(spec, max_attempts, stack)
                hosted = HostedSandbox(sandbox, self._count_overdue)
                give_away(hosted, start_s)
                await hosted._closing.wait()
        finally:
            if hosted is not None:
                self._in_use.discard(hosted)
                hosted._gone.set()

    def _count_overdue(self) -> None:
        self._overdue_total += 1

    async def _start(self, spec: SandboxSpec, max_attempts: int, stack: AsyncExitStack) -> tuple[Sandbox, float]:
        """Return the sandbox, entered into `stack`, and the seconds of its start, without waits for gates."""
        self._starting += 1
        try:
            for attempt in range(1, max_attempts + 1):
                try:
                    async with self._gates.enter(spec.image):
                        if self._gates.paused:
                            raise SandboxUnavailable(self._gates.paused)
                        began = trio.current_time()
                        sandbox = await self._enter(spec, stack)
                        start_s = trio.current_time() - began
                except SandboxUnavailable as exc:
                    self._failed_total += 1
                    if attempt == max_attempts or not exc.retryable:
                        raise
                    backoff_s = START_BACKOFF_S * 2 ** (attempt - 1)
                    logger.warning("attempt %d to start a sandbox failed, again in %g s: %s", attempt, backoff_s, exc)
                    await trio.sleep(backoff_s)
                else:
                    self._started_total += 1
                    self._start_seconds_total += start_s
                    return sandbox, start_s
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._starting -= 1

    async def _follow_pool(self) -> None:
        """Start and end warm sandboxes by the pool's plan, until cancelled."""
        while True:
            self._pool_changed = trio.Event()
            now_s = trio.current_time()
            plan = self._pool.plan(now_s)
            for hosted in plan.end:
                self._warm_evicted_total += 1
                hosted._closing.set()
            for key in plan.start:
                own = contained(self._own_warm, "the owner of a warm sandbox")
                self._nursery.start_soon(own, key, name="warm sandbox owner")
            with trio.move_on_at(self._pool.next_change_s(now_s)):
                await self._pool_changed.wait()


@asynccontextmanager
async def open_sandbox_host(
    provider: SandboxProvider,
    *,
    max_concurrent_starts: int = 4,
    max_concurrent_starts_per_image: int = 4,
    warm: WarmLimits | None = None,
    on_open: OnOpen | None = None,
    pulls: PullLimits | None = None,
) -> AsyncIterator[SandboxHost]:
    """Open a host for sandboxes of `provider`. On exit, all are ended, whatever they are doing.

    `warm`: how many to start in advance; default none. `on_open` is called for every sandbox handed out. `pulls`:
    limits of pulls of images that are not in the store; by default none is pulled.
    """
    pool: WarmPool[HostedSandbox] = WarmPool(warm or WarmLimits())
    gates = StartGates(max_concurrent_starts, max_concurrent_starts_per_image)
    with single_exception():
        async with provider.open_shared(), trio.open_nursery() as nursery:
            puller = None if pulls is None else ImagePuller(pulls, nursery)
            host = SandboxHost(provider, nursery, gates, pool, on_open, puller)
            try:
                nursery.start_soon(service_task(host._watch_starts, "trial starts of sandboxes"))
                if pool.limits.max_warm > 0:
                    nursery.start_soon(service_task(host._follow_pool, "warm sandboxes"))
                yield host
            finally:
                nursery.cancel_scope.cancel("the sandbox host ends")
