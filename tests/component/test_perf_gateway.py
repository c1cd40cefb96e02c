"""`perf.gateway`: its rules and its sessions, in small."""

from __future__ import annotations

from perf.chat_families import write_family_model
from perf.gateway import DOCUMENT_TOKENS, document, hold_sessions
from perf.gateway_rules import Call, Trained, score, scores
from prorl_trio.chat.format import ChatFormat


async def test_ours_alone_neither_loses_nor_doubles_nor_misplaces_a_token(tmp_path):
    chat = ChatFormat.load(write_family_model(tmp_path, "qwen2.5"))
    found = await scores(chat, sessions=3, requests=20)
    ours = found.pop("ours")
    assert ours.sampled > 500
    assert (ours.false_context, ours.lost, ours.doubled) == (0, 0, 0)
    assert all(each.sampled == ours.sampled for each in found.values())
    assert found["polar"].false_context > 0
    assert found["slime"].lost > 0
    assert found["uni_agent"].lost > 0
    assert (found["rllm"].false_context, found["rllm"].lost) == (0, 0)
    assert 0.95 * DOCUMENT_TOKENS < len(chat.codec.encode(document(chat))) <= DOCUMENT_TOKENS


def test_what_is_counted():
    calls = [Call((), (1, 2), (3, 4)), Call((), (1,), (5,))]
    contexts = [call.read for call in calls]
    rows = [Trained((1, 2), (3, 4)), Trained((9,), (3, 4))]
    assert score(calls, contexts, rows) == (3, 2, 1, 2, 2)


async def test_memory_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("perf.gateway.OPEN_SESSIONS", 3)
    monkeypatch.setattr("perf.gateway.OPEN_TURNS", 4)
    async with hold_sessions(str(write_family_model(tmp_path, "qwen2.5"))) as used:
        assert len(used) == 2
