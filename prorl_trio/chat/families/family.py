"""The known model families, and how to detect a family by its chat template."""

from __future__ import annotations

from typing import NamedTuple

from prorl_trio.chat.codec import MARKUP
from prorl_trio.chat.families.deepseek import DEEPSEEK
from prorl_trio.chat.families.gemma import GEMMA_4
from prorl_trio.chat.families.harmony import HARMONY
from prorl_trio.chat.families.kimi import KIMI_K2, KIMI_K3
from prorl_trio.chat.families.llama import LFM2, LLAMA
from prorl_trio.chat.families.mistral import MISTRAL
from prorl_trio.chat.families.syntax import HERMES, CallSyntax
from prorl_trio.chat.families.xml import GLM_XML, HUNYUAN, MINIMAX, QWEN_XML, SEED_XML, STEP3
from prorl_trio.types.errors import ConfigError


class Family(NamedTuple):
    """The facts about a family that its template does not contain.

    Attributes:
        name: the value of `[model] family` in node.toml.
        signs: texts that its template must all contain.
        syntax: its syntax of tool calls and reasoning.
        markup: control tokens that an assistant writes inside its turn: text, not structure of the dialogue.
        ends: the tokens that end its turns, if they differ from the template's closing. A sampled one replaces the
            template's.
    """

    name: str
    signs: tuple[str, ...]
    syntax: CallSyntax
    markup: frozenset[str] = MARKUP
    ends: tuple[str, ...] = ()


_GLM_MARKUP = MARKUP | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}

FAMILIES: tuple[Family, ...] = (
    Family(
        "kimi-k3", ("<|open|>", "<|sep|>"), KIMI_K3, MARKUP | {"<|open|>", "<|close|>", "<|sep|>"}, ("<|end_of_msg|>",)
    ),
    Family(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        KIMI_K2,
        MARKUP
        | {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"}
        | {"<|tool_call_begin|>", "<|tool_call_end|>"},
    ),
    Family("minimax", ("<minimax:tool_call>",), MINIMAX, MARKUP | {"<minimax:tool_call>", "</minimax:tool_call>"}),
    Family(
        "step3",
        ("<steptml:invoke",),
        STEP3,
        MARKUP | {"<｜tool_sep｜>"} | {f"<｜tool_call{part}｜>" for part in ("s_begin", "s_end", "_begin", "_end")},
    ),
    Family(
        "seed",
        ("<seed:bos>",),
        SEED_XML,
        MARKUP | {"<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"},
    ),
    Family("hunyuan", ("<tool_calls>",), HUNYUAN, _GLM_MARKUP | {"<tool_calls>", "</tool_calls>", "<tool_sep>"}),
    Family("lfm2", ("<|tool_call_start|>",), LFM2, MARKUP | {"<|tool_call_start|>", "<|tool_call_end|>"}),
    Family("granite", ("<|start_of_role|>",), QWEN_XML),
    Family("ling", ("<role>",), GLM_XML, _GLM_MARKUP),
    Family("qwen3-coder", ("<|im_start|>", "<function="), QWEN_XML),
    Family("qwen3", ("<|im_start|>", "<tool_call>", "<think>"), HERMES),
    Family("glm", ("<|assistant|>", "<arg_key>"), GLM_XML, _GLM_MARKUP),
    Family(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        HARMONY,
        frozenset({"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"}),
        ("<|return|>", "<|call|>"),
    ),
    Family(
        "deepseek",
        ("<｜User｜>", "<｜Assistant｜>"),
        DEEPSEEK,
        MARKUP
        | {"｜DSML｜"}
        | {f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")},
    ),
    Family("mistral", ("[INST]",), MISTRAL, MARKUP | {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"}),
    Family("llama", ("<|start_header_id|>",), LLAMA, MARKUP | {"<|python_tag|>"}),
    Family(
        "gemma4",
        ("<|turn>", "<|tool_call>"),
        GEMMA_4,
        MARKUP | {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"},
    ),
    Family("gemma", ("<start_of_turn>",), HERMES),
    Family("chatml", ("<|im_start|>",), HERMES),
    Family("generic", (), HERMES),
)
"""From the most specific family to a family for every other model."""


def choose_family(name: str, template: str) -> Family:
    """Return the family called `name`; without a name, the first whose signs are all in `template`.

    Raises:
        ConfigError: the name is unknown.
    """
    known = {family.name: family for family in FAMILIES}
    if name and name not in known:
        raise ConfigError(f"model.family: no family is called {name!r}; there are: {', '.join(known)}")
    return known[name] if name else next(each for each in FAMILIES if all(sign in template for sign in each.signs))
