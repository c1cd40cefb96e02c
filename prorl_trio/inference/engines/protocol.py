"""The protocol of an LLM engine's client: token ids in, token ids and log-probabilities out, counts checked."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from prorl_trio.types.errors import BackendError
from prorl_trio.types.models import Constraint, FinishReason, LogprobKind, PolicySpan, SamplingParams

if TYPE_CHECKING:
    from prorl_trio.inference.engines.load_report import LoadReport
    from prorl_trio.types.backends import PauseMode

TokenSink = Callable[[list[int], list[float]], int | None]
"""Receives the ids and log-probabilities since the last call. Returns None to continue, or n to keep the first n of
these tokens and stop sampling. Must not raise."""


class EnginePaused(BackendError):
    """The engine is paused, by this pool or another client. Says nothing about its health; retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class CompletionTimedOut(BackendError):
    """The completion was not complete in time; retryable. Tokens that were streamed are valid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class CannotStream(BackendError):
    """The engine ignored the request to stream; it may still answer without streaming. Not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class RequestRefused(BackendError):
    """The engine refused the request because of its content. Says nothing about the engine's health; not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class Guide(msgspec.Struct, frozen=True):
    """A grammar that an engine must enforce on a completion.

    Attributes:
        constraint: its name in spans.
        structural_tag: the grammar as JSON text in the format of xgrammar's structural tags.
    """

    constraint: Constraint
    structural_tag: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The results of probing a backend.

    Attributes:
        url: its origin.
        model: the name under which it serves the policy.
        max_model_len: prompt plus completion, in tokens.
        engine: name and version.
        policy_version: the version of its weights for spans. This is the engine's own label until a resume announces
            another version; `0` if it has none.
        label: the engine's own name for those weights at the last contact; `0`: unnamed. Empty: not reported.
        logprob_kind: the distribution that its log-probabilities refer to, determined by sampling with `top_k` 1.
        api: the path used for completions.
        pausable: the engine can be paused, or needs no pause, and accepts a version for its weights.
        prefix_caching: the engine reuses prefixes; None if unreported.
        weights: the source for reloading its weights (see `EngineClient.load_weights`); empty if unreported.
        model_folder: the model that it was started with, a folder as it sees it or a public name; empty if unreported.
        guides: the engine can enforce a grammar.
    """

    url: str
    model: str
    max_model_len: int
    engine: str
    policy_version: str
    label: str = ""
    logprob_kind: LogprobKind = "raw"
    api: str = ""
    pausable: bool = False
    prefix_caching: bool | None = None
    weights: str = ""
    model_folder: str = ""
    guides: bool = False


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A completion request to an engine.

    Attributes:
        prompt_token_ids: the prompt. Thousands wait at once: an `array` needs a seventh of the memory of a list.
        sampling, max_tokens: sampling parameters, and the maximal number of tokens.
        request_id: for logs; need not be unique.
        timeout_s: for the answer, including all retries.
        cache_salt: prefixes are shared only among requests with the same salt.
        sink: receives the tokens as they arrive, and may end the completion. A client that cannot stream never calls
            it.
        guide: the required grammar. An engine that cannot enforce it refuses.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    request_id: str
    timeout_s: float
    cache_salt: str = ""
    sink: TokenSink | None = None
    guide: Guide | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled continuation of N tokens.

    `token_ids` (int32) and `logprobs` (float32: natural log, of the sampled token) have N entries each, and N equals
    the engine's own usage count. A sampled end-of-turn token is included. Other sequence types from custom engines are
    converted. The arrays must not be modified; they are passed on until they are recorded.

    `spans` cover the N tokens, starting at position 0. None means a single span, described by `policy_version` and
    `engine`. `versions_told`: the engine itself reported the version of the weights for each token, and the spans
    contain its labels. `label`: the engine's name for its weights at the end; empty if unreported.

    `dropped_tokens` arrived in the same piece, after the token at which the sink had enough. Any tokens that the engine
    sampled before it noticed the disconnect are unknown.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: FinishReason
    policy_version: str
    engine: str
    spans: list[PolicySpan] = []
    versions_told: bool = False
    label: str = ""
    dropped_tokens: int = 0

    def __post_init__(self) -> None:
        """Convert other sequences to int32 and float32 arrays. Decoded answers become arrays only here.

        Raises:
            BackendError: an id or log-probability is not a number of that type; not retryable.
        """
        for name, kind in (("token_ids", "i"), ("logprobs", "f")):
            given = getattr(self, name)
            if not (isinstance(given, array) and given.typecode == kind):
                try:
                    msgspec.structs.force_setattr(self, name, array(kind, given))
                except (TypeError, OverflowError) as exc:
                    raise BackendError(
                        f"the backend returned a token id or logprob that is none: {exc}", retryable=False
                    ) from exc


def span_of(
    info: EngineInfo, sampling: SamplingParams, guide: Guide | None, start: int, end: int, version: str
) -> PolicySpan:
    """Return a span of tokens sampled by `info`'s engine with these settings, under that version of the weights."""
    return PolicySpan(
        start=start,
        end=end,
        policy_version=version,
        engine=info.engine,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        logprob_kind=info.logprob_kind,
        constraint=None if guide is None else guide.constraint,
    )


class EngineClient(abc.ABC):
    """A client of one backend. It supports any number of concurrent calls; connections are kept alive and bounded."""

    url: str

    async def is_there(self, *, timeout_s: float) -> bool:
        """Return whether a server of this kind, fit or not, answers at `url`; the kind `auto` relies on this.

        `auto` never selects a client that does not implement it.

        Raises:
            BackendError: no server can be reached there.
        """
        del timeout_s
        await trio.lowlevel.checkpoint()
        return False

    @abc.abstractmethod
    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """Ask for model and limits, and sample two tokens to check that the counts of ids and logprobs agree.

        Raises:
            BackendError: the server is down (`retryable`), or unfit for token-exact work (not retryable), with the
                reason.
            EnginePaused: the engine reports that it is paused.
        """

    @abc.abstractmethod
    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample the completion requested by `request`.

        When the sink has enough, the client disconnects, which makes the engine abort. The finish reason is then
        `tool_call`, unless the engine finished on its own at the same time.

        Cancellation closes the connection, which makes the engine abort the request. Connection errors and 5xx before
        the first byte of an answer are retried with backoff within its `timeout_s`. Nothing is retried after tokens
        were received.

        Raises:
            BackendError: after the retries, or at once when counts of ids, logprobs and usage differ.
            RequestRefused: this engine rejects the request as invalid.
            ContextLengthExceeded: the engine reports that the prompt does not fit.
        """

    async def load(self, *, timeout_s: float) -> LoadReport | None:
        """Return the engine's current load, or None if it does not report it. Default: None.

        Raises:
            BackendError: the engine failed to answer.
        """
        await trio.lowlevel.checkpoint()
        return None

    async def tokenize(self, text: str, *, timeout_s: float) -> list[int] | None:
        """Return the ids from the engine's own tokenizer for `text`; control tokens in the text are recognised.

        No token is added. Returns None if the engine does not expose its tokenizer. Default: None.

        Raises:
            BackendError: the engine cannot be reached.
        """
        await trio.lowlevel.checkpoint()
        return None

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float) -> str | None:
        """Return the text from the engine's own tokenizer for ids, control tokens included. See `tokenize`."""
        await trio.lowlevel.checkpoint()
        return None

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """Stop sampling in the engine itself, for a change of weights. Returns False if the engine lacks that feature.

        Raises:
            BackendError: the engine has the feature, but it failed.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """Set the engine's name for its weights, so that it can report the version of each token.

        Returns False, without any effect, if the engine lacks that feature.

        Raises:
            BackendError: the engine has the feature, but it failed.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def read_label(self, *, timeout_s: float) -> str:
        """Return the engine's own name for its weights; empty if it does not report it. Default: empty.

        Raises:
            BackendError: the engine has the feature, but it failed.
        """
        await trio.lowlevel.checkpoint()
        return ""

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """Replace the engine's weights with the contents of `folder`, a path as the engine sees it, while it is paused.

        Its prefix cache is dropped with the old weights. Returns False, without any effect, if the engine lacks that
        feature.

        Raises:
            BackendError: loading failed or was not answered, so the engine's current weights are unknown.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> bool:
        """Load a LoRA adapter from `folder`, a path as the engine sees it, and replace an adapter of that name.

        Nothing is sampled with it before `use_adapter`. Returns False, without any effect, if adapters are not
        supported.

        Raises:
            BackendError: loading failed or was not answered.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Unload an adapter. Unloading an unknown adapter is not an error.

        Raises:
            BackendError: the engine failed.
        """
        await trio.lowlevel.checkpoint()

    def use_adapter(self, name: str) -> None:
        """Sample every following completion with this loaded adapter; empty: with the model alone.

        It is called only on clients whose `load_adapter` returned True.
        """
        raise NotImplementedError(f"{self.url}: it takes no adapter, and {name!r} was to be used")

    async def resume(self, *, timeout_s: float) -> None:
        """End a `pause` that returned True.

        Raises:
            BackendError: the engine failed.
        """
        await trio.lowlevel.checkpoint()

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close every connection. Calls in flight fail."""


ClientFinder = Callable[[str, float], Awaitable[EngineClient]]
"""Creates the client of the engine at a URL after its kind is known, within the given seconds. Raises BackendError if
no server answers there. The caller must close the client."""


def made_by(make: Callable[[str], EngineClient]) -> ClientFinder:
    """Return a finder for engines of one kind. It calls `make` with the URL and sends no request."""

    async def find(url: str, _timeout_s: float) -> EngineClient:
        await trio.lowlevel.checkpoint()
        return make(url)

    return find
