"""The contract of engine clients with their engines. Run it on your own client.

    pytest.register_assert_rewrite("prorl_trio.testing.engine_contract")

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def engine(self):
            ...
            yield EngineUnderTest(...)

The tests need pytest-trio, or another plugin that runs async tests under trio.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import trio
from tokenizers import Tokenizer

from prorl_trio.chat.guided import json_format, structural_tag
from prorl_trio.inference.engines.protocol import (
    Completion,
    CompletionRequest,
    EngineClient,
    Guide,
    RequestRefused,
    TokenSink,
)
from prorl_trio.types.errors import ContextLengthExceeded
from prorl_trio.types.models import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
FORM = Guide(
    "json",
    structural_tag(
        [
            json_format(
                {
                    "type": "object",
                    "properties": {"count": {"type": "integer"}, "colour": {"enum": ["red", "blue"]}},
                    "required": ["count", "colour"],
                    "additionalProperties": False,
                }
            )
        ]
    ),
)
NO_FORM = Guide("json", structural_tag([json_format({"type": "nothing-that-there-is"})]))
TEST_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
LOGPROB_TOLERANCE = 0.15
"""Tolerance between two runs of a bfloat16 engine with different batch shapes."""


class EngineUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with the data that the contract needs.

    Attributes:
        client: created, but not yet probed.
        prompt_token_ids: a prompt with a long answer.
        end_of_turn_id: the token that ends a turn.
        wait_running: waits until the number of completions in the engine, queued ones included, fulfils a condition.
        count_finished: returns the number of completions that the engine has finished on its own since its start.
        certain_prompt_token_ids: a prompt that a greedy engine answers with at least 4 tokens and an end of turn. Each
            token must be far enough ahead of the next candidate that rounding cannot change it. One of the first 4 must
            have a probability below 0.7. None: `prompt_token_ids` fulfils this.
        max_answer_tokens: enough for that answer.
        streams: the client can stream.
        weights_folder: a folder from which it can reload its current weights; None: it cannot load weights.
        pauses: it is paused while it loads weights. False: it loads them beside running completions.
        adapter_folder: a folder with a LoRA adapter for it; None: it does not support adapters.
        tokenizer_file: the `tokenizer.json` of its model; None: it is not available for comparison.
    """

    client: EngineClient
    prompt_token_ids: list[int]
    end_of_turn_id: int
    wait_running: Callable[[Callable[[int], bool]], Awaitable[object]]
    count_finished: Callable[[], Awaitable[int]]
    certain_prompt_token_ids: list[int] | None = None
    max_answer_tokens: int = 256
    streams: bool = True
    weights_folder: str | None = None
    pauses: bool = True
    adapter_folder: str | None = None
    tokenizer_file: str | None = None


class EngineContract:
    """Subclass it with a fixture `engine` that yields an `EngineUnderTest`; each test gets a probed client."""

    async def test_probe_reports_model_and_limits(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            info = await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            assert info.url == engine.client.url
            assert info.model
            assert info.engine
            assert info.policy_version
            assert info.max_model_len > len(engine.prompt_token_ids)

    async def test_counts_agree(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            completion = await _generate(engine, SamplingParams(), max_tokens=16)
            assert 1 <= len(completion.token_ids) <= 16
            assert len(completion.logprobs) == len(completion.token_ids)

    async def test_logprobs_are_finite_and_not_positive(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            completion = await _generate(engine, SamplingParams(), max_tokens=32)
            assert all(math.isfinite(value) and value <= 1e-3 for value in completion.logprobs)
            assert any(value < -1e-6 for value in completion.logprobs), "not one token was uncertain"

    async def test_logprobs_are_of_the_raw_distribution(self, engine: EngineUnderTest) -> None:
        """With `top_k` 1 the log-probability of the processed distribution would be 0."""
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            greedy = await _generate(engine, GREEDY, max_tokens=4)
            narrowed = await _generate(engine, SamplingParams(top_k=1), max_tokens=4)
            assert min(greedy.logprobs) < -2 * LOGPROB_TOLERANCE, "too certain: the check below could not fail"
            assert narrowed.token_ids == greedy.token_ids
            assert _distance(narrowed.logprobs, greedy.logprobs) < LOGPROB_TOLERANCE

    async def test_a_prefix_that_was_sampled_continues_the_same_way(self, engine: EngineUnderTest) -> None:
        """The engine uses the ids unchanged: no template, no added token, no re-tokenisation."""
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            whole = await _generate(engine, GREEDY, max_tokens=4)
            rest = await _generate(
                engine, GREEDY, max_tokens=2, prompt=[*_certain_prompt(engine), *whole.token_ids[:2]]
            )
            assert rest.token_ids == whole.token_ids[2:]
            assert _distance(rest.logprobs, whole.logprobs[2:]) < LOGPROB_TOLERANCE

    async def test_max_tokens_ends_with_length(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            for max_tokens in (1, 3):
                completion = await _generate(engine, GREEDY, max_tokens=max_tokens)
                assert len(completion.token_ids) == max_tokens
                assert completion.finish_reason == "length"

    async def test_end_of_turn_stops_and_is_included(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            completion = await _generate(engine, GREEDY, max_tokens=engine.max_answer_tokens)
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] == engine.end_of_turn_id
            assert engine.end_of_turn_id not in completion.token_ids[:-1]

    async def test_stop_token_stops_and_is_included(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            whole = await _generate(engine, GREEDY, max_tokens=4)
            stop = whole.token_ids[2]
            sampling = msgspec.structs.replace(GREEDY, stop_token_ids=[stop])
            completion = await _generate(engine, sampling, max_tokens=16)
            assert completion.finish_reason == "stop"
            assert completion.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]

    async def test_a_prompt_beyond_the_context_is_refused(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            info = await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            for length in (info.max_model_len, info.max_model_len + 1):
                prompt = _repeated(engine.prompt_token_ids, length)
                error: ContextLengthExceeded | None = None
                try:
                    await _generate(engine, GREEDY, max_tokens=1, prompt=prompt)
                except ContextLengthExceeded as exc:
                    error = exc
                assert error is not None, f"a prompt of {length} tokens was accepted"
                assert (error.prompt_tokens, error.max_model_len) == (length, info.max_model_len)

    async def test_the_context_may_be_filled_to_the_last_token(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            info = await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            prompt = _repeated(engine.prompt_token_ids, info.max_model_len - 1)
            completion = await _generate(engine, GREEDY, max_tokens=100, prompt=prompt)
            assert len(completion.token_ids) == 1

    async def test_its_tokenizer_is_its_models_or_not_offered(self, engine: EngineUnderTest) -> None:
        """The comparison is the node's, which rejects engines of another model."""
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            ids = await engine.client.tokenize("A <tool_call> of 12?", timeout_s=CALL_TIMEOUT_S)
            text = await engine.client.detokenize([engine.end_of_turn_id], timeout_s=CALL_TIMEOUT_S)
            if ids is None:
                assert text is None
                assert engine.tokenizer_file is None
                return
            assert text
            if engine.tokenizer_file is not None:
                tokenizer = Tokenizer.from_file(engine.tokenizer_file)
                assert ids == tokenizer.encode("A <tool_call> of 12?", add_special_tokens=False).ids
                assert text == tokenizer.decode([engine.end_of_turn_id], skip_special_tokens=False)
            assert await engine.client.tokenize(text, timeout_s=CALL_TIMEOUT_S) == [engine.end_of_turn_id]

    async def test_a_completion_has_the_form_that_it_is_to_have_and_its_spans_say_so(
        self, engine: EngineUnderTest
    ) -> None:
        """Otherwise the engine reports that it cannot enforce a grammar, and refuses."""
        with trio.fail_after(TEST_TIMEOUT_S):
            info = await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            try:
                completion = await _generate(engine, GREEDY, max_tokens=64, guide=FORM)
            except RequestRefused:
                assert not info.guides
                return
            assert info.guides
            for sink in (None, lambda _ids, _logprobs: None):
                try:
                    await _generate(engine, GREEDY, max_tokens=64, guide=NO_FORM, sink=sink)
                except RequestRefused:
                    continue
                raise AssertionError("it takes a form that there is not")
            assert {span.constraint for span in completion.spans} == {"json"}
            free = await _generate(engine, GREEDY, max_tokens=4)
            assert {span.constraint for span in free.spans} == {None}
            assert completion.finish_reason == "stop"
            ids = list(completion.token_ids)
            text = await engine.client.detokenize(ids[: ids.index(engine.end_of_turn_id)], timeout_s=CALL_TIMEOUT_S)
            if text is not None:
                answer = msgspec.json.decode(text)
                assert set(answer) == {"count", "colour"}
                assert answer["colour"] in ("red", "blue")

    async def test_many_at_once(self, engine: EngineUnderTest) -> None:
        completions: list[Completion] = []

        async def one(index: int) -> None:
            completions.append(await _generate(engine, SamplingParams(), max_tokens=8, request_id=f"many-{index}"))

        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            async with trio.open_nursery() as nursery:
                for index in range(64):
                    nursery.start_soon(one, index)
            assert len(completions) == 64
            assert all(1 <= len(completion.token_ids) <= 8 for completion in completions)
            await engine.wait_running(lambda running: running == 0)

    async def test_cancel_aborts_in_the_engine(self, engine: EngineUnderTest) -> None:
        async def long() -> None:
            await _generate(engine, SamplingParams(), max_tokens=1000)

        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            for _ in range(3):
                finished = await engine.count_finished()
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(long)
                    await engine.wait_running(lambda running: running > 0)
                    nursery.cancel_scope.cancel()
                await engine.wait_running(lambda running: running == 0)
                assert await engine.count_finished() - finished < 4, "all ran to their end"
            assert (await _generate(engine, GREEDY, max_tokens=1)).token_ids

    async def test_weights_are_loaded_from_a_folder_or_not_at_all(self, engine: EngineUnderTest) -> None:
        """Reloading the same weights gives the same samples.

        A client without this feature reports that, without side effects.
        """
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            before = await _generate(engine, GREEDY, max_tokens=4)
            if engine.weights_folder is not None:
                assert await engine.client.pause("wait", timeout_s=CALL_TIMEOUT_S) == engine.pauses
            folder = engine.weights_folder or "/no/such/folder"
            loaded = await engine.client.load_weights(folder, timeout_s=CALL_TIMEOUT_S)
            assert loaded == (engine.weights_folder is not None)
            if loaded:
                await engine.client.resume(timeout_s=CALL_TIMEOUT_S)
            after = await _generate(engine, GREEDY, max_tokens=4)
            assert after.token_ids == before.token_ids
            assert _distance(after.logprobs, before.logprobs) < LOGPROB_TOLERANCE

    async def test_an_adapter_is_used_from_when_it_is_told_or_never_loaded(self, engine: EngineUnderTest) -> None:
        """A later adapter replaces an earlier one of the same name; unloading an unknown one is not an error."""
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            before = await _generate(engine, GREEDY, max_tokens=4)
            folder = engine.adapter_folder or "/no/such/folder"
            for _ in range(2):
                loaded = await engine.client.load_adapter("adapter-v1", folder, timeout_s=CALL_TIMEOUT_S)
                assert loaded == (engine.adapter_folder is not None)
            if not loaded:
                return
            engine.client.use_adapter("adapter-v1")
            assert (await _generate(engine, GREEDY, max_tokens=4)).token_ids
            engine.client.use_adapter("")
            for _ in range(2):
                await engine.client.unload_adapter("adapter-v1", timeout_s=CALL_TIMEOUT_S)
            after = await _generate(engine, GREEDY, max_tokens=4)
            assert after.token_ids == before.token_ids
            assert _distance(after.logprobs, before.logprobs) < LOGPROB_TOLERANCE

    async def test_the_label_that_it_was_told_is_the_one_that_it_says(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            for label in ("contract-1", "contract-2"):
                if await engine.client.label_weights(label, timeout_s=CALL_TIMEOUT_S):
                    assert await engine.client.read_label(timeout_s=CALL_TIMEOUT_S) == label

    async def test_a_stream_is_the_same_completion(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            for max_tokens in (3, engine.max_answer_tokens):
                whole = await _generate(engine, GREEDY, max_tokens=max_tokens)
                seen = Streamed()
                streamed = await _generate(engine, GREEDY, max_tokens=max_tokens, sink=seen.take)
                assert streamed.token_ids == whole.token_ids
                assert streamed.finish_reason == whole.finish_reason
                assert _distance(streamed.logprobs, whole.logprobs) < LOGPROB_TOLERANCE
                assert streamed.dropped_tokens == 0
                if engine.streams:
                    assert array("i", seen.token_ids) == streamed.token_ids
                    assert array("f", seen.logprobs) == streamed.logprobs

    async def test_a_sink_that_has_enough_ends_the_completion_at_that_token(self, engine: EngineUnderTest) -> None:
        """The completion ends as after a complete tool call.

        The engine continues briefly; its later tokens are not in the completion.
        """
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            if not engine.streams:
                return
            whole = await _generate(engine, GREEDY, max_tokens=4)
            seen = Streamed(enough=2)
            stopped = await _generate(engine, GREEDY, max_tokens=engine.max_answer_tokens, sink=seen.take)
            assert stopped.finish_reason == "tool_call"
            assert stopped.token_ids == whole.token_ids[:2]
            assert _distance(stopped.logprobs, whole.logprobs[:2]) < LOGPROB_TOLERANCE
            assert stopped.dropped_tokens == len(seen.token_ids) - 2
            await engine.wait_running(lambda running: running == 0)
            prompt = [*_certain_prompt(engine), *stopped.token_ids]
            rest = await _generate(engine, GREEDY, max_tokens=2, prompt=prompt, sink=Streamed().take)
            assert rest.token_ids == whole.token_ids[2:]

    async def test_a_cancelled_stream_aborts_in_the_engine(self, engine: EngineUnderTest) -> None:
        with trio.fail_after(TEST_TIMEOUT_S):
            await engine.client.probe(timeout_s=CALL_TIMEOUT_S)
            if not engine.streams:
                return
            seen = Streamed()
            async with trio.open_nursery() as nursery:

                async def stream() -> None:
                    await _generate(engine, SamplingParams(), max_tokens=1000, sink=seen.take)

                nursery.start_soon(stream)
                with trio.move_on_after(CALL_TIMEOUT_S):
                    await seen.began.wait()
                nursery.cancel_scope.cancel()
            await engine.wait_running(lambda running: running == 0)
            assert len(seen.token_ids) == len(seen.logprobs) > 0


class Streamed:
    """A sink that stores its tokens, and stops after a number of tokens; None: never."""

    def __init__(self, enough: int | None = None) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.began = trio.Event()
        self._enough = enough

    def take(self, token_ids: list[int], logprobs: list[float]) -> int | None:
        before = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.began.set()
        return self._enough - before if self._enough is not None and len(self.token_ids) >= self._enough else None


async def _generate(
    engine: EngineUnderTest,
    sampling: SamplingParams,
    *,
    max_tokens: int,
    prompt: list[int] | None = None,
    request_id: str = "contract",
    sink: TokenSink | None = None,
    guide: Guide | None = None,
) -> Completion:
    """Complete `prompt`; the default is the engine's prompt, or the certain one for greedy sampling."""
    if prompt is None:
        certain = sampling.temperature == 0 or sampling.top_k == 1
        prompt = _certain_prompt(engine) if certain else engine.prompt_token_ids
    return await engine.client.generate(
        CompletionRequest(
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            request_id=request_id,
            timeout_s=CALL_TIMEOUT_S,
            sink=sink,
            guide=guide,
        )
    )


def _certain_prompt(engine: EngineUnderTest) -> list[int]:
    return engine.certain_prompt_token_ids or engine.prompt_token_ids


def _repeated(token_ids: list[int], length: int) -> list[int]:
    return (token_ids * (length // len(token_ids) + 1))[:length]


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
