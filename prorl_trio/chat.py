"""Messages to token ids and back for one model, token-exact over many turns.

`ChatFormat` knows how the model speaks: its chat template (see `chat_template`) and its tokenizer, which is used such
that no message can forge a control token (see `chat_codec`). `Conversation` is one dialogue (see `chat_conversation`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prorl_trio.chat_codec import TokenCodec
from prorl_trio.chat_conversation import CompletionRange, Conversation, OnRewrite, ParsedTurn
from prorl_trio.chat_template import Capabilities, ChatTemplate, Message, ToolSchema
from prorl_trio.errors import ConfigError
from prorl_trio.families.family import Family, choose_family
from prorl_trio.families.syntax import HERMES
from prorl_trio.model_folder import read_model_folder
from prorl_trio.tool_calls import SpokenTurn, parse_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prorl_trio.models import ChatMessage

__all__ = ["ChatFormat", "CompletionRange", "Conversation", "OnRewrite", "ParsedTurn"]


@dataclass(frozen=True, slots=True, eq=False)
class ChatFormat:
    """How one model speaks: its tokenizer and its chat template. Immutable, to be shared; its calls use the CPU only.

    Attributes:
        model_dir: the folder it was loaded from.
        end_of_turn_id: what the template closes an assistant turn with before a user's message.
        end_of_turn_ids: every id that ends a turn when sampled: the former, that before a tool's result (another one
            for GLM), and the end-of-sequence ids of tokenizer_config.json and generation_config.json.
        family: how it writes tool calls and reasoning.
    """

    model_dir: Path
    end_of_turn_id: int
    end_of_turn_ids: frozenset[int]
    family: Family
    codec: TokenCodec = field(repr=False)
    template: ChatTemplate = field(repr=False)

    @classmethod
    def load(
        cls, model_dir: Path, *, family: str = "", template_options: Mapping[str, Any] | None = None
    ) -> ChatFormat:
        """Read a model folder. Takes a second or more for a large vocabulary: call it in a thread.

        Args:
            model_dir: with the tokenizer and the chat template.
            family: the name of one of `FAMILIES`; without it, the one that the template and the tokens look like.
            template_options: variables for the template, such as `enable_thinking`.

        Raises:
            ConfigError: a file is missing or broken, there is no chat template or no such family, or the template fails
                its self-test (loses messages, closes no assistant turn with a control token). The message says which
                and why.
        """
        folder = read_model_folder(model_dir)
        chosen = choose_family(family, folder.template, folder.template_file)
        codec = TokenCodec(folder.tokenizer_json, folder.tokenizer_file, chosen.markup)
        template = ChatTemplate(folder.template, folder.special_tokens, folder.template_file, template_options)
        probe: Message = {"role": "user", "content": "probe"}
        closings = [codec.encode(template.delta([{**probe, "role": role}], [probe])) for role in ("user", "tool")]
        for closing in closings:
            if not closing or closing[0] not in codec.added_ids.values():
                raise ConfigError(
                    f"{folder.template_file}: no end-of-turn token: after an assistant's content the chat template "
                    f"writes {codec.decode(closing[:4])!r}, which does not begin with one of the tokenizer's added "
                    "tokens"
                )
        end_id, *other_ends = (closing[0] for closing in closings)
        eos_id = codec.added_ids.get(folder.special_tokens.get("eos_token", ""), end_id)
        ends = frozenset({end_id, *other_ends, eos_id, *folder.eos_token_ids})
        return cls(model_dir, end_id, ends, chosen, codec, template)

    @property
    def capabilities(self) -> Capabilities:
        """What the template was found to do."""
        return self.template.capabilities

    @property
    def stop_token_ids(self) -> list[int]:
        """`end_of_turn_ids`, sorted: what an engine must stop at."""
        return sorted(self.end_of_turn_ids)

    @property
    def vocab_size(self) -> int:
        """Every id the tokenizer knows is below it. The model's embedding may have more rows."""
        return self.codec.vocab_size

    def open(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = (), *, on_rewrite: OnRewrite = "keep"
    ) -> Conversation:
        """Begin a conversation that is ready for the assistant's first turn.

        Args:
            messages: rendered as the template has it, its default system message included. Text that looks like a
                control token is encoded as text, save `<think>` and `<tool_call>` in an assistant's message.
            tools: functions the policy may call, as JSON schemas in OpenAI's format.
            on_rewrite: see `OnRewrite`.

        Raises:
            HandlerError: the template refuses the messages, or a tool has no name.
        """
        return Conversation(self, messages, tools, on_rewrite)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, for tools and people. `skip_special` leaves out what structures the dialogue."""
        return self.codec.decode(ids, skip_special=skip_special)

    def parse(self, ids: Sequence[int], tools: Mapping[str, Any], opened_thinking: bool) -> SpokenTurn:
        """Return what a completion says; `tools` maps the names a call may have to the schemas of their parameters.

        Where the template renders no tools, they are described to the policy as `<tool_call>` with JSON, and calls in
        the family's own syntax are understood as well.
        """
        text = self.decode(ids, skip_special=True)
        own = self.family.syntax
        syntaxes = (own,) if self.capabilities.renders_tools or own is HERMES else (HERMES, own)
        turns = (parse_turn(text, tools, syntax=each, opened_thinking=opened_thinking) for each in syntaxes)
        first = next(turns)
        return first if first.tool_calls else next(turns, first)
