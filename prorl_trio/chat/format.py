"""Messages to token ids and back for one model, token-exact over many turns.

`ChatFormat` knows how the model speaks: its chat template (see `template`) and its tokenizer, which is used such that
no message can forge a control token (see `codec`). `conversation.Conversation` is one dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from prorl_trio.chat.codec import TokenCodec
from prorl_trio.chat.families.family import Family, choose_family
from prorl_trio.chat.families.syntax import HERMES
from prorl_trio.chat.model_folder import read_model_folder
from prorl_trio.chat.probe import probe
from prorl_trio.chat.template import Capabilities, ChatTemplate, call_id, parameter_schemas
from prorl_trio.chat.tool_calls import SpokenTurn, parse_turn
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.model_facts import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prorl_trio.chat.families.syntax import CallSyntax
    from prorl_trio.chat.history import Recall
    from prorl_trio.chat.messages import Message, ToolSchema
    from prorl_trio.types.models import ToolCall

MAX_PADDING_ROWS = 2048
"""Rows of an embedding beyond its tokenizer. Published models have up to 1,069 (`vocab_size` in config.json of
openai/gpt-oss-20b is 201,088, and its tokenizer knows 200,019 ids)."""

OnBreak = Literal["keep", "segment", "fail"]
"""The treatment of a template that would render an earlier turn otherwise than it was sampled (Qwen3 drops old
reasoning at a new user message), so that its next prompt would not begin with the tokens so far: keep them as they were
sampled, append-only; begin a new segment with the template's own rendering; or raise TokenDrift."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatFormat:
    """A model's tokenizer and chat template. Immutable, to be shared; its calls use the CPU only.

    Attributes:
        model_dir: the folder it was loaded from.
        end_of_turn_id: what an assistant's turn ends with before a user's message.
        end_of_turn_ids: every id that ends a turn when sampled: the former, that before a tool's result (another one
            for GLM), and the end-of-sequence ids of tokenizer_config.json and generation_config.json.
        closing_ids: what the template closes a turn with.
        family: how it writes tool calls and reasoning.
        on_break: of its conversations, where they are not told; see `OnBreak`.
        sampleable: every id that the model can sample is below it: the tokenizer's, and the embedding's rows that
            config.json tells of; None where there is none.
        max_positions: the longest sequence that the model was made for, in tokens; 0 where config.json does not say.
        architecture: what config.json says of the model; see `architecture_of`.
    """

    model_dir: Path
    end_of_turn_id: int
    end_of_turn_ids: frozenset[int]
    closing_ids: frozenset[int]
    family: Family
    on_break: OnBreak
    codec: TokenCodec = field(repr=False)
    template: ChatTemplate = field(repr=False)
    sampleable: int | None = None
    max_positions: int = 0
    architecture: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        family: str = "",
        template_options: Mapping[str, Any] | None = None,
        on_break: OnBreak = "keep",
    ) -> ChatFormat:
        """Read a model folder. Takes a second or more for a large vocabulary: call it in a thread.

        Args:
            model_dir: with the tokenizer and the chat template.
            family: the name of one of `FAMILIES`; without it, the one that the template and the tokens look like.
            template_options: variables for the template, such as `enable_thinking`.
            on_break: see `OnBreak`.

        Raises:
            ConfigError: a file is missing or broken, there is no chat template or no such family, or the template fails
                its self-test (loses messages, closes no assistant turn with a control token). The message says which
                and why.
        """
        folder = read_model_folder(model_dir)
        chosen = choose_family(family, folder.template)
        codec = TokenCodec(folder.tokenizer_json, folder.tokenizer_file, chosen.markup)
        template = ChatTemplate(
            folder.template, folder.special_tokens, folder.template_file, template_options, codec.control_pattern
        )
        probed = template.dated()
        probe(probed)
        template.capabilities = probed.capabilities
        closings = _closing_ids(template, codec)
        eos_id = codec.added_ids.get(folder.special_tokens.get("eos_token", ""), closings[0])
        ends = [codec.added_ids[end] for end in chosen.ends if end in codec.added_ids] or [*closings, eos_id]
        return cls(
            model_dir=model_dir,
            end_of_turn_id=ends[0],
            end_of_turn_ids=frozenset({*ends, *folder.eos_token_ids}),
            closing_ids=frozenset(closings),
            family=chosen,
            on_break=on_break,
            codec=codec,
            template=template,
            sampleable=max(folder.rows, codec.vocab_size) if folder.rows else None,
            max_positions=folder.max_positions,
            architecture=folder.architecture,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Return what the template was found to do."""
        return self.template.capabilities

    def dated(self) -> ChatFormat:
        """Return one like this for which it is now for ever. See `ChatTemplate.dated`."""
        return replace(self, template=self.template.dated())

    def recalling(self, recall: Recall) -> ChatFormat:
        """Return one like this that remembers of a dialogue what `recall` says."""
        return replace(self, template=self.template.recalling(recall))

    @property
    def stop_token_ids(self) -> list[int]:
        """`end_of_turn_ids`, sorted: what an engine must stop at."""
        return sorted(self.end_of_turn_ids)

    @property
    def vocab_size(self) -> int:
        """Every id the tokenizer knows is below it. The model's embedding may have more rows."""
        return self.codec.vocab_size

    @property
    def ids_below(self) -> int:
        """Every id that this model can sample is below it: `sampleable`, where config.json says it.

        Without it, what the tokenizer knows and `MAX_PADDING_ROWS`: an id of a row that only pads the embedding is one
        that the policy may sample, and is no sign of another model.
        """
        return self.vocab_size + MAX_PADDING_ROWS if self.sampleable is None else self.sampleable

    def facts(self) -> dict[str, object]:
        """Return the fields of `ModelFacts`, for trainers."""
        facts = ModelFacts(
            vocabulary=self.codec.vocabulary,
            vocab_size=self.vocab_size,
            sampleable=self.sampleable,
            end_of_turn_ids=self.stop_token_ids,
            architecture=dict(self.architecture),
        )
        return msgspec.structs.asdict(facts)

    def closes_alike(self, sampled_id: int, closing_id: int) -> bool:
        """Return whether a turn that ends with `sampled_id` needs no `closing_id` of the template's any more."""
        return sampled_id == closing_id or bool(self.family.ends and sampled_id in self.end_of_turn_ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, for tools and people. `skip_special` leaves out what structures the dialogue."""
        return self.codec.decode(ids, skip_special=skip_special)

    @property
    def call_syntaxes(self) -> tuple[CallSyntax, ...]:
        """Return the syntaxes in which the policy may write its calls."""
        own = self.family.syntax
        return (own,) if self.capabilities.renders_tools or own is HERMES else (HERMES, own)

    def read_turn(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """Return the text of one completion without what structures the dialogue, and the calls written in it.

        `raw` of each call is how the text has it, reasoning included. `tools` are those that the policy was offered.
        """
        return self.decode(ids, skip_special=True), self.parse(ids, parameter_schemas(tools), False).tool_calls

    def parse(
        self, ids: Sequence[int], tools: Mapping[str, Any], opened_thinking: bool, following: str = ""
    ) -> SpokenTurn:
        """Return what a completion says; `tools` maps the names a call may have to the schemas of their parameters.

        `following` is text to be read after it, as if it had been sampled, too.

        Where the template renders no tools, they are described to the policy as `<tool_call>` with JSON, and calls in
        the family's own syntax are understood as well.
        """
        text = self.decode(ids, skip_special=True) + following
        turns = (parse_turn(text, tools, syntax=each, opened_thinking=opened_thinking) for each in self.call_syntaxes)
        first = next(turns)
        return first if first.tool_calls else next(turns, first)


def _closing_ids(template: ChatTemplate, codec: TokenCodec) -> list[int]:
    """Return the ids that the template closes an assistant's turn with: before a user's message, before a tool's."""
    call: Message = {"id": call_id(1), "function": {"name": "probe"}}
    found = []
    for role in ("user", "tool"):
        said: Message = {"role": role, "content": "probe", "tool_call_id": call_id(1)}
        closing = codec.encode(template.delta([said], [{"role": "user", "content": "probe"}], calls=[call]))
        if not closing or closing[0] not in codec.added_ids.values():
            raise ConfigError(
                f"{template.origin}: no end-of-turn token: after an assistant's content the chat template writes "
                f"{codec.decode(closing[:4])!r}, which does not begin with one of the tokenizer's added tokens"
            )
        found.append(closing[0])
    return found
