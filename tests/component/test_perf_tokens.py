"""`perf.tokens`: its dialogues, its control and its peers' process, in small."""

from __future__ import annotations

import os
import sys

import msgspec
import pytest
import trio

from perf import tokens
from perf.harness import Options, Report
from perf.peers.environments import PEERS, PeerUnavailable
from perf.tokens import (
    OPENING,
    TOOLS,
    TURN_TOKENS,
    WAYS,
    Dialogue,
    Drift,
    Sampled,
    draw_turns,
    drift_of,
    measure_peers,
    sampled_at_random,
    sampled_ids,
    time_turns,
    whole_dialogue,
)
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.models import ChatMessage
from support.chat_families import write_family_model

CONTEXTS = (1_000, 4_000)
STAND_INS = {
    "transformers.py": """
class PreTrainedTokenizerFast:
    @classmethod
    def from_pretrained(cls, folder):
        return cls()
    def apply_chat_template(self, messages, tools, add_generation_prompt, return_dict):
        assert add_generation_prompt and tools and not return_dict
        return [len(messages)]
""",
    "renderers.py": """
from types import SimpleNamespace
def Qwen3RendererConfig():
    return "config"
def create_renderer(tokenizer, config):
    return Renderer()
class Renderer:
    def render_ids(self, messages, tools, add_generation_prompt):
        return [len(messages)]
    def parse_response(self, token_ids, tools, prompt_ids):
        self.parsed = token_ids
    def bridge_to_next_turn(self, prompt_ids, completion_ids, new_messages, tools):
        assert self.parsed == completion_ids
        return SimpleNamespace(token_ids=prompt_ids + completion_ids + [len(new_messages)])
""",
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatFormat.load(write_family_model(tmp_path_factory.mktemp("model"), "qwen3"))


def test_the_same_seed_is_the_same_dialogue_with_a_call_in_each_turn(chat):
    first, again, other = (draw_turns(seed) for seed in (1, 1, 2))
    turn = next(first)
    assert turn == next(again) != next(other)
    conversation = Conversation(chat, OPENING, TOOLS)
    ids = sampled_ids(chat, turn.said)
    (call,) = conversation.add_completion(ids, [-1.0] * len(ids)).tool_calls
    assert (call.name, call.error) == ("bash", "")


def test_a_dialogue_grows_as_the_whole_of_it_is_rendered(chat):
    dialogue, drawn, said = Dialogue(chat, 3), draw_turns(3), []
    for _ in range(4):
        assert len(dialogue) == len(Conversation(chat, whole_dialogue(said), TOOLS))
        times = dialogue.turn()
        said.append(next(drawn))
        assert times.context_tokens < len(dialogue)
        assert min(times[1:]) > 0


def test_turns_are_timed_around_each_context(chat):
    times = time_turns(chat, 1, CONTEXTS, rounds=2)
    assert {context: len(turns) for context, turns in times.items()} == dict.fromkeys(CONTEXTS, 2)
    short, long = ([turn.context_tokens for turn in turns] for turns in times.values())
    assert short == sorted(short)
    assert CONTEXTS[1] - TURN_TOKENS <= long[0] < long[1]
    assert short[0] < CONTEXTS[1] - TURN_TOKENS


def test_what_is_sampled_otherwise_than_text_is_encoded_counts_as_drift(chat):
    prompt = Conversation(chat, OPENING, TOOLS).prompt_token_ids()
    usual = chat.codec.encode("return value")
    unusual = [token_id for character in "return value" for token_id in chat.codec.encode(character)]
    assert usual != unusual
    assert chat.decode(usual) == chat.decode(unusual)
    kept, lost = (Sampled(prompt, ids, [*prompt, *ids, 5]) for ids in (usual, unusual))
    changed = Sampled(prompt, usual, [*prompt, *unusual, 5])
    last = Sampled(prompt, unusual, [])
    drift = drift_of(chat, [kept, lost, changed, last])
    assert drift == Drift(3, 1, 1)


def test_a_split_that_is_not_the_tokenizers_is_drift_from_there_on(chat):
    whole = chat.codec.encode("return")
    cut = [*chat.codec.encode("value"), *chat.codec.encode("r"), *chat.codec.encode("eturn")]
    assert chat.codec.encode("valuereturn") != cut
    prompt = Conversation(chat, OPENING, TOOLS).prompt_token_ids()
    drift = drift_of(chat, [Sampled(prompt, whole, [*prompt, *whole]), Sampled(prompt, cut, [*prompt, *cut])])
    assert (drift.ours, drift.retokenised) == (0, 1)


def test_the_fake_engines_ids_survive_ours_and_not_always_text(chat):
    turns = [turn for seed in range(4) for turn in sampled_at_random(chat, seed)]
    drift = drift_of(chat, turns)
    assert drift.turns == 4 * tokens.DRIFT_TURNS
    assert drift.ours == 0
    assert 0 < drift.retokenised <= drift.turns
    assert all(turn.completion_ids[-1] == chat.end_of_turn_id for turn in turns)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """The peer's environment, with modules that stand in for its packages; the folder its process works in."""
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    environment = PEERS["renderers"].folder()
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (environment / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    for name, text in STAND_INS.items():
        (packages / name).write_text(text)
    (environment / ".complete").touch()
    folder = tmp_path / "peers"
    folder.mkdir()
    return folder


async def test_peers_make_their_prompts_of_the_same_dialogue(chat, stand_ins):
    drawn = draw_turns(0)
    dialogues = {1_000: [next(drawn)], 4_000: [next(drawn) for _ in range(3)]}
    with trio.fail_after(60):
        series, differing = await measure_peers(chat, dialogues, rounds=2, folder=stand_ins)
    assert {each.case.name: len(each.samples) for each in series} == {
        f"{way}.{context}": 2 for way in WAYS for context in ("1k", "4k")
    }
    assert all(taken > 0 for each in series for taken in each.samples)
    assert len(differing) == 4, "the stand-ins make no real prompts, and that is noticed"


@pytest.mark.parametrize("family", ["qwen3", "none"])
async def test_a_report_has_the_metrics_and_says_which_peer_is_missing(family, tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    if family == "qwen3":
        monkeypatch.setenv("PRORL_MODEL_DIR", str(write_family_model(tmp_path / "model", family)))
    monkeypatch.setattr(tokens, "CONTEXTS", (1_000, 5_000))
    monkeypatch.setattr(tokens, "QUICK_DIALOGUES", 1)
    monkeypatch.setattr(tokens, "DRIFT_DIALOGUES", 2)
    monkeypatch.setattr(tokens, "QUICK_PEER_ROUNDS", 1)
    with trio.fail_after(120):
        report = await tokens.tokens(Options(quick=True, json_path=None))
    metrics = report.metrics()
    assert metrics["render.us_per_turn_1k"] == pytest.approx(metrics["turn.1k.p50_us"], abs=0.01)
    assert metrics["render.flatness"] > 0
    assert metrics["render.rerender_over_whole_5k"] > 0
    assert metrics["drift.ours"] == 0
    assert 0 < metrics["drift.retokenised_rate"] <= 1
    assert {f"turn.5k.p{percent}_us" for percent in (50, 95)} <= metrics.keys()
    assert not any("transformers" in name for name in metrics)
    why = "python -m perf.peers setup renderers" if family == "qwen3" else "name it in PRORL_MODEL_DIR"
    assert any("left out: " in note and why in note for note in report.notes)
    assert isinstance(report, Report)
    path = tmp_path / "out" / "tokens.json"
    report.write_json(path)
    assert msgspec.json.decode(path.read_bytes()) == metrics
    assert report.write_plot(path.with_suffix(".png"))
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_other_models_are_measured_with_their_names(tmp_path, monkeypatch):
    refused = tmp_path / "refused"
    refused.mkdir()
    folders = [write_family_model(tmp_path / name, name) for name in ("smollm2", "qwen3")]
    monkeypatch.setenv("PRORL_MODEL_DIR", ":".join(map(str, [refused, *folders])))
    chosen, others = tokens.load_models(tmp_path / "unused", quick=False)
    assert (chosen.model_dir, [other.model_dir for other in others]) == (folders[1], folders[:1])
    monkeypatch.setattr(tokens, "CONTEXTS", (1_000, 3_000))
    assert tokens.flatness_of(others, 1)["smollm2"] > 0
    chosen, others = tokens.load_models(tmp_path / "unused", quick=True)
    assert (chosen.model_dir, others) == (folders[1], [])


async def test_peers_that_are_not_installed_are_told(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    with pytest.raises(PeerUnavailable, match=r"perf\.peers setup renderers"):
        await measure_peers(chat, {}, rounds=1, folder=tmp_path)


def test_the_dialogue_begins_with_what_is_asked():
    assert whole_dialogue([]) == list(OPENING)
    assert all(isinstance(message, ChatMessage) for message in whole_dialogue([next(draw_turns(0))]))
