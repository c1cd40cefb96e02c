"""A turn of the same dialogue in the peers' process: `renderers`, and transformers' rendering of everything."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

import msgspec
import trio

from perf.peers.environments import PEERS
from perf.peers.process import open_peer
from perf.tokens_dialogue import TOOLS, DialogueTurn, sampled_ids, whole_dialogue
from prorl_trio.chat.conversation import Conversation

if TYPE_CHECKING:
    from pathlib import Path

    from perf.peers.process import PeerProcess
    from prorl_trio.chat.format import ChatFormat
    from prorl_trio.types.models import ChatMessage

__all__ = ["WAYS", "measure_peers"]

WAYS = ("renderers", "transformers")
Samples = dict[tuple[str, int], list[float]]


async def measure_peers(
    chat: ChatFormat, dialogues: dict[int, list[DialogueTurn]], *, rounds: int, folder: Path
) -> tuple[Samples, list[str]]:
    """Time each way `rounds` times with the last turn of each dialogue as the new one.

    Args:
        chat: of a model of the family Qwen3, in a folder that transformers can read.
        dialogues: turns by the length of context that they make.
        rounds: at each length; what warms up is not counted.
        folder: an empty one, for the peers' files.

    Returns:
        Seconds of CPU time by way and context, and a sentence for each prompt that is not ours.

    Raises:
        PeerUnavailable: the peers are not installed, or failed.
    """
    samples: Samples = {}
    differing: list[str] = []
    env = {"PATH": os.defpath, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    async with open_peer(PEERS["renderers"], env=env, cwd=folder, log=folder / "log") as peer:
        for context, turns in dialogues.items():
            path = trio.Path(folder / f"{context}.json")
            expected = await trio.to_thread.run_sync(_digest, chat, turns)
            await path.write_bytes(msgspec.json.encode(_state(chat, turns)))
            await peer.run(f"begin {path}")
            for way in WAYS:
                samples[way, context] = await _time(peer, way, rounds)
                if (await peer.run("digest")).output != expected:
                    differing.append(f"{way}: its prompt of {context} tokens is not the one that the template makes")
    return samples, differing


async def _time(peer: PeerProcess, way: str, rounds: int) -> list[float]:
    times_s = [float((await peer.run(way)).output) for _ in range(rounds + 1)]
    return times_s[1:]


def _state(chat: ChatFormat, turns: list[DialogueTurn]) -> dict[str, object]:
    """The last turn is the one that the peers make a prompt of."""
    last = turns[-1]
    return {
        "model_dir": str(chat.model_dir),
        "messages": [_plain(message) for message in whole_dialogue(turns[:-1])],
        "said": last.said,
        "completion_ids": sampled_ids(chat, last.said),
        "new_messages": [{"role": "tool", "content": last.result, "name": "bash"}],
        "tools": TOOLS,
    }


def _plain(message: ChatMessage) -> dict[str, str]:
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **name}


def _digest(chat: ChatFormat, turns: list[DialogueTurn]) -> str:
    ids = Conversation(chat, whole_dialogue(turns), TOOLS).prompt_token_ids()
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()
