"""Recordings of what real clients sent, with fillers for all that they say, and the segments that come of them.

To record anew, with the agents installed, where a version of one has changed:

    PRORL_RECORD_AGENTS=/tmp/heard .venv/bin/python -m pytest -m slow tests/integration/test_agent_scenarios.py
    PYTHONPATH=tests .venv/bin/python -m support.agent_recordings /tmp/heard

That replaces `tests/data/agents/CLIENT.json.xz`; `segments.txt` beside it is what the tests compare with: edit it by
hand, since it is the specification.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import re
import secrets
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_trio.agent.said import planted
from prorl_trio.edges.gateway import chat, google, messages, responses
from support.agent_scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.types.models import Trajectory, Turn

FOLDER = Path(__file__).parents[1] / "data" / "agents"
SEGMENTS = FOLDER / "segments.txt"
KEPT_HEADERS = ("anthropic-version", "x-openai-subagent", "thread-id", "x-claude-code-agent", "x-claude-code-request")
KEPT = {
    *("role", "type", "name", "namespace", "model", "mode", "keep", "required", "tool_choice", "responseMimeType"),
    *("id", "call_id", "tool_use_id", "tool_call_id", "signature", "encrypted_content", "thoughtSignature"),
    *("arguments", "args"),
}
"""Fields whose values are no words of the client's: names, ids, keys of ours, and arguments, which the policy wrote."""
OPENER = "<|im_start|>assistant\n"


# ------------------------------------------------------------ segments


def label(turn: Turn) -> str:
    """Name a turn by its calls, with the number that a command prints, or else by its first words."""
    said = turn.text.rpartition("</think>")[2].removesuffix("<|im_end|>").strip()
    calls = re.findall(r'"name": "(\w+)", "arguments": (.*)', said)
    named = [
        f"{name} {int(number[1]) + 1}" if (number := re.search(r"expr (\d)", made)) else name for name, made in calls
    ]
    return " and ".join(named) or json.dumps(said[:20])


def shared(trajectory: Trajectory, index: int) -> str:
    """Describe the tokens that a segment has of its parent."""
    segment = trajectory.segments[index]
    turns = [turn for turn in trajectory.turns if turn.segment == segment.parent]
    ends = [turn.completion_end for turn in turns]
    if segment.shared in ends:
        where = f"to the end of turn {ends.index(segment.shared)}"
    elif segment.shared in (starts := [turn.completion_start for turn in turns]):
        where = f"to the beginning of turn {starts.index(segment.shared)}"
    else:
        where = "within its prompt" if not turns or segment.shared < turns[0].completion_start else "within its turns"
    return f"{segment.shared} tokens, {where}"


def table(trajectory: Trajectory) -> list[str]:
    """Return a line for each segment: reason, parent, shared tokens, who spoke, and the turns in it."""
    lines = []
    for index, segment in enumerate(trajectory.segments):
        turns = ", ".join(label(turn) for turn in trajectory.turns if turn.segment == index)
        begun = (
            "the task"
            if segment.reason is None
            else f"{segment.reason} of {segment.parent}, {shared(trajectory, index)}"
        )
        who = f" ({segment.agent_type})" if segment.agent_type else ""
        lines.append(f"{index} {begun}{who}: {turns}")
    return lines


def without_numbers(lines: Iterable[str]) -> list[str]:
    """Return the lines of a table without the counts, which depend on dates and names of folders."""
    return [re.sub(r", \d+ tokens", "", line) for line in lines]


def read_tables() -> dict[tuple[str, str], list[str]]:
    """Return the specified lines by client and scenario."""
    tables: dict[tuple[str, str], list[str]] = {}
    for line in SEGMENTS.read_text().splitlines():
        if line.startswith("## "):
            client, _, scenario = line[3:].partition(": ")
            lines = tables[client, scenario] = []
        elif line and not line.startswith("#"):
            lines.append(line)
    return tables


# ------------------------------------------------------------ fillers


class Filler:
    """Puts letters for all that is not a space. Equal words become equal words, and beginnings equal beginnings."""

    def __init__(self, ours: Sequence[str]) -> None:
        self._salt = secrets.token_bytes(16)
        self._ours = "\0".join(ours)
        self.made: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return the filler of a text; a text that the policy said is its own."""
        if text in self.made or (text and text in self._ours):
            return self.made.get(text, text)
        self.made[text] = re.sub(r"\S+", lambda found: self._word(found[0]), text)
        return self.made[text]

    def _word(self, word: str) -> str:
        digest = hashlib.blake2b(self._salt)
        letters = []
        for char in word:
            digest.update(char.encode("utf-8", "surrogatepass"))
            letters.append("abcdefghijklmnop"[digest.digest()[0] % 16])
        return "".join(letters)

    def fill(self, value: Any) -> Any:
        """Return a value with fillers for the words in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.fill(each) for each in value]
        if not isinstance(value, dict):
            return value
        kept = {name for name, inner in value.items() if name in KEPT and not isinstance(inner, dict)} | {"args"}
        if value.get("type") in ("tool_use", "custom_tool_call"):
            kept.add("input")
        return {name: inner if name in kept else self.fill(inner) for name, inner in value.items()}

    def fits(self) -> bool:
        """Return whether other texts have other fillers. Where two have the same by chance, another salt helps."""
        for one, other in pairwise(sorted(self.made)):
            assert not other.startswith(one) or self.made[other].startswith(self.made[one]), "a beginning was lost"
        return len(set(self.made.values())) == len(self.made)


def filled(heard: list[dict[str, Any]], filler: Filler) -> list[dict[str, Any]]:
    """Return the requests of a recording with what the gateway reads of them."""
    requests = []
    for entry in heard:
        if "/messages" in entry["path"]:
            known = messages.KNOWN
        else:
            known = chat.KNOWN | responses.KNOWN if "/v1/" in entry["path"] else google.KNOWN
        body = {name: value for name, value in json.loads(entry["body"]).items() if name in known}
        headers = {name: value for name, value in entry["headers"].items() if name.startswith(KEPT_HEADERS)}
        if turn := entry["headers"].get("x-codex-turn-metadata"):
            headers["x-codex-turn-metadata"] = json.dumps({"request_kind": json.loads(turn)["request_kind"]})
        path = re.sub(r"^/s/[^/]+", "", entry["path"])
        requests.append({"path": path, "headers": headers, "body": filler.fill(body)} | {
            name: entry[name] for name in ("fault", "key", "said") if entry.get(name)
        })  # fmt: skip
    return requests


def load(client: str) -> dict[str, list[dict[str, Any]]]:
    """Return the recordings of a client by scenario."""
    recordings: dict[str, list[dict[str, Any]]] = json.loads(
        lzma.decompress((FOLDER / f"{client}.json.xz").read_bytes())
    )
    return recordings


def recorded() -> list[tuple[str, str]]:
    """Return client and scenario of each recording."""
    return [
        (path.name.partition(".")[0], name) for path in sorted(FOLDER.glob("*.xz")) for name in load(path.name[:-8])
    ]


def main() -> None:
    """Pack what was heard into recordings."""
    FOLDER.mkdir(exist_ok=True)
    heard: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(sys.argv[1]).glob("*.json")):
        client, _, scenario = path.stem.partition("+")
        heard.setdefault(client, {})[scenario] = json.loads(path.read_text())
    for client, scenarios in heard.items():
        served = [text for entries in scenarios.values() for entry in entries for text in entry.get("served", ())]
        fits = False
        while not fits:
            filler = Filler([*served, *(each.once for each in SCENARIOS.values())])
            made = {name: filled(entries, filler) for name, entries in scenarios.items()}
            fits = filler.fits()
        packed = lzma.compress(json.dumps(made, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
        (FOLDER / f"{client}.json.xz").write_bytes(packed)
        sys.stdout.write(f"{client}: {len(made)} scenarios, {len(packed)} bytes\n")


# ------------------------------------------------------------ replay


def rekeyed(text: str, keys: dict[str, str]) -> str:
    """Return a body in which the keys that were planted in a recording are those that were planted now."""
    for old, new in keys.items():
        text = text.replace(planted(old), planted(new))
        before, after = (base64.b64encode(planted(key).encode()).decode() for key in (old, new))
        text = text.replace(before, after)
    return text


if __name__ == "__main__":
    main()
