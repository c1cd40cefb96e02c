"""What a call in flight keeps of its prompt, and how an engine's echo of it is checked."""

from __future__ import annotations

import gc

import msgspec
import pytest
import trio

from prorl_trio.inference.engines.answers import ContractBroken, Prompt
from prorl_trio.inference.engines.protocol import EngineInfo
from prorl_trio.inference.engines.vllm import VllmClient
from support.completions import asked, begun

TOKENS = 5_003
DEADLINE_S = 20


def lists_of_prompt() -> int:
    gc.collect()
    return sum(type(found) is list and len(found) == TOKENS for found in gc.get_objects())


async def test_a_call_in_flight_holds_no_list_of_its_prompt():
    arrived = trio.Event()

    async def swallow(stream: trio.SocketStream) -> None:
        async with stream:
            received = b""
            while received.count(b",") < TOKENS:
                received += await stream.receive_some()
            arrived.set()
            await trio.sleep_forever()

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, swallow, [listener])
            client = VllmClient(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
            client._info = EngineInfo(
                url=client.url,
                model="m",
                max_model_len=TOKENS + 9,
                engine="e",
                policy_version="0",
                api="/v1/completions",
            )
            partial = begun(asked(list(range(TOKENS)), 9, timeout_s=DEADLINE_S))

            async def call() -> None:
                await client.generate(partial.request)

            nursery.start_soon(call)
            await arrived.wait()
            assert lists_of_prompt() == 0
            assert list(partial.prompt_token_ids) == list(range(TOKENS))
            nursery.cancel_scope.cancel()
        await client.aclose()


@pytest.mark.parametrize("read", [b"[1,2,300]", b"[1, 2, 300]", b" [1,\n2,300] ", b"", b"null"])
def test_the_same_prompt_is_accepted_however_it_is_written(read: bytes):
    Prompt.of([1, 2, 300]).check(msgspec.Raw(read))


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (b"[1,2]", "sent a prompt of 3, it read one of 2"),
        (b"[1,2,301]", "it read one of 3"),
        (b"[]", "it read one of 0"),
        (b'"[1,2,300]"', "no list of ids"),
        (b"[1,2,300.5]", "no list of ids"),
    ],
)
def test_another_prompt_is_refused(read: bytes, why: str):
    with pytest.raises(ContractBroken, match=why):
        Prompt.of([1, 2, 300]).check(msgspec.Raw(read))
