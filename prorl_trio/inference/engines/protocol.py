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
"""Given the ids and log-probabilities that came since the last call. None: go on; n: keep the first n of these, and
stop sampling. Must not raise."""


class EnginePaused(BackendError):
    """The engine is paused, by whomever. Says nothing of its health; retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class CompletionTimedOut(BackendError):
    """The completion was not whole in time; retryable. What was streamed of it is good."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class CannotStream(BackendError):
    """The engine did not stream what it was asked to; in one piece it may be had. Not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class RequestRefused(BackendError):
    """The engine refused the request for what is in it. Says nothing of its health; not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class Guide(msgspec.Struct, frozen=True):
    """A form that an engine is to keep a completion to.

    Attributes:
        constraint: as spans name it.
        structural_tag: the form, as JSON text in the format of xgrammar's structural tags.
    """

    constraint: Constraint
    structural_tag: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a probe of a backend.

    Attributes:
        url: its origin.
        model: the name it serves the policy under.
        max_model_len: prompt plus completion, in tokens.
        engine: name and version.
        policy_version: of its weights, as spans are to name it. The engine's own label, until a resume says otherwise;
            `0` where it has none.
        label: what the engine itself called those weights when it was last heard of; `0`: it has no name for them.
            Empty: it does not say.
        logprob_kind: what its log-probabilities are of, found out by sampling with `top_k` 1.
        api: the path that completions are asked for at.
        pausable: it can be paused, and told the version of its weights.
        prefix_caching: it reuses prefixes; None where it does not say.
        weights: what it can load them from again (see `EngineClient.load_weights`); empty: it does not say.
        model_folder: what it was started with, a folder as it sees it or a public name; empty: it does not say.
        guides: it can keep a completion to a form.
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
    """A completion as an engine is asked for it.

    Attributes:
        prompt_token_ids: what it is to follow. Thousands wait at once: an `array` is a seventh of a list.
        sampling, max_tokens: how to sample, and how many tokens at most.
        request_id: for logs; need not be unique.
        timeout_s: for the answer, with all that is sent again.
        cache_salt: prefixes are shared only among requests of the same one.
        sink: is given the tokens as they come, and may end the completion. A client that cannot stream never calls it.
        guide: the form that it is to have. An engine that cannot keep to it refuses.
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
    the engine's own usage count. The end-of-turn token is included when it was sampled. Other sequences, of an engine
    of your own, are converted. Nobody changes the arrays: they travel as they are until they are recorded.

    `spans` cover the N tokens, position 0 being the first of them. None: all are of one kind, by `policy_version` and
    `engine`. `versions_told`: the engine itself said which of them were sampled by which version of the weights, and
    its labels are in the spans. `label`: what it called its weights at the end; empty: it did not say.

    `dropped_tokens` came with, but after, the token at which the sink had enough. What the engine went on to sample
    until it noticed is not known, nor what it would have.
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
        """Make int32 and float32 arrays of other sequences: the one place where what was read becomes arrays.

        Raises:
            BackendError: an id or log-probability is no number of that type; not retryable.
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
    """Return a span of tokens that `info`'s engine sampled so, under that version of the weights."""
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
    """A client of one backend. Safe for any number of concurrent calls; connections are kept alive and bounded."""

    url: str

    async def is_there(self, *, timeout_s: float) -> bool:
        """Return whether a server of this kind, fit or not, answers at `url`: what the kind `auto` goes by.

        A client that does not say is never found by `auto`.

        Raises:
            BackendError: no server can be reached there.
        """
        del timeout_s
        await trio.lowlevel.checkpoint()
        return False

    @abc.abstractmethod
    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """Ask for model and limits, and sample two tokens to see that ids and logprobs come and agree in number.

        Raises:
            BackendError: it is down (`retryable`), or not fit for token-exact work (not retryable), with the reason.
            EnginePaused: where it says so.
        """

    @abc.abstractmethod
    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample what `request` asks for.

        A sink that has enough ends the completion: the engine is left, upon which it aborts, and the finish reason is
        `tool_call`, unless the engine had ended it by itself at the same time.

        Cancellation closes the connection, upon which the engine aborts the request. Connection errors and 5xx before
        the first byte of an answer are retried with backoff inside its `timeout_s`; never after tokens were received.

        Raises:
            BackendError: after the retries, or at once when counts of ids, logprobs and usage differ.
            RequestRefused: what was asked for is no valid request to this engine.
            ContextLengthExceeded: the engine says that the prompt does not fit.
        """

    async def load(self, *, timeout_s: float) -> LoadReport | None:
        """Return what the engine has to do at this moment; None where it does not say. Default: None.

        Raises:
            BackendError: it failed to answer.
        """
        await trio.lowlevel.checkpoint()
        return None

    async def tokenize(self, text: str, *, timeout_s: float) -> list[int] | None:
        """Return the ids that the engine's own tokenizer has for `text`, in which control tokens count as such.

        No token is added. None where the engine does not offer its tokenizer. Default: None.

        Raises:
            BackendError: it cannot be reached.
        """
        await trio.lowlevel.checkpoint()
        return None

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float) -> str | None:
        """Return the text that the engine's own tokenizer has for ids, control tokens included. See `tokenize`."""
        await trio.lowlevel.checkpoint()
        return None

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """Have the engine itself stop sampling, for a change of weights. False if it does not offer that.

        Raises:
            BackendError: it offers it and failed.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """Tell the engine what its weights are called from now on, so that it can say which tokens are of which.

        False, and nothing happened, where it cannot be told.

        Raises:
            BackendError: it can be told, and failed.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def read_label(self, *, timeout_s: float) -> str:
        """Return what the engine itself says that its weights are called; empty where it does not say. Default: empty.

        Raises:
            BackendError: it says it, and failed.
        """
        await trio.lowlevel.checkpoint()
        return ""

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """Have it replace its weights by those in `folder`, a path as the engine sees it, while it is paused.

        What it remembers of prompts goes with them. False, and nothing happened, where it does not offer that.

        Raises:
            BackendError: it offers it and failed, or gave no answer: which weights it has is not known.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> bool:
        """Have it load a LoRA adapter from `folder`, a path as the engine sees it, in place of one of that name.

        Nothing is sampled with it before `use_adapter`. False, and nothing happened, where it takes no adapters.

        Raises:
            BackendError: it takes them and failed, or gave no answer.
        """
        await trio.lowlevel.checkpoint()
        return False

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        """Have it forget an adapter. One that it does not have is no error.

        Raises:
            BackendError: it failed.
        """
        await trio.lowlevel.checkpoint()

    def use_adapter(self, name: str) -> None:
        """Have every completion from now on sampled with this adapter, which was loaded; empty: with the model alone.

        Only of clients whose `load_adapter` returned True is this asked.
        """
        raise NotImplementedError(f"{self.url}: it takes no adapter, and {name!r} was to be used")

    async def resume(self, *, timeout_s: float) -> None:
        """End a `pause` that returned True.

        Raises:
            BackendError: it failed.
        """
        await trio.lowlevel.checkpoint()

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close every connection. Calls in flight fail."""


ClientFinder = Callable[[str, float], Awaitable[EngineClient]]
"""Makes the client of the engine at a URL, once it is known which kind it is, within so many seconds. Raises
BackendError: nobody answers there. The client is the caller's to close."""


def made_by(make: Callable[[str], EngineClient]) -> ClientFinder:
    """Return a finder for engines of one kind: nothing is asked, and `make` is called with the URL."""

    async def find(url: str, _timeout_s: float) -> EngineClient:
        await trio.lowlevel.checkpoint()
        return make(url)

    return find
