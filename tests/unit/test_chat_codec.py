"""Text to ids and back: what is text stays text, in the ids that the tokenizer itself gives to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf.chat_families import write_family_model
from prorl_trio.chat.codec import TokenCodec
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.models import ChatMessage


def codec_with(folder, **tokens):
    """A codec whose tokenizer has, besides, the added token `content` with these flags."""
    file = write_family_model(folder, "qwen3") / "tokenizer.json"
    spec = json.loads(file.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    first = max(token["id"] for token in spec["added_tokens"]) + 1
    spec["added_tokens"] += [
        {"id": first + n, "content": content, **plain, **flags} for n, (content, flags) in enumerate(tokens.items())
    ]
    return TokenCodec(json.dumps(spec).encode(), Path("tokenizer.json"))


@pytest.mark.parametrize("tag", ["<b>", "</b>", "<table>", "</td>", "<h1>", "<strong>"])
def test_html_is_encoded_as_the_tokenizer_does(tmp_path, tag):
    codec = codec_with(tmp_path, **{tag: {}})
    text = f"a {tag}x{tag}\n{tag}"
    ids = codec.encode(codec.mark(text))
    assert ids.count(codec.added_ids[tag]) == 3
    assert ids == codec.encode_whole(text)


@pytest.mark.parametrize(
    ("token", "flags"), [("<b>", {"special": True}), ("<s>", {}), ("</s>", {}), ("<answer>", {}), ("<unused1>", {})]
)
def test_what_may_be_more_than_html_stays_text(tmp_path, token, flags):
    codec = codec_with(tmp_path, **{token: flags})
    ids = codec.encode(codec.mark(f"a {token}x"))
    assert codec.added_ids[token] not in ids
    assert codec.decode(ids) == f"a {token}x"


def test_a_token_swallows_the_white_space_that_the_tokenizer_swallows(tmp_path):
    codec = codec_with(tmp_path, **{"<|end|>": {"special": True, "lstrip": True, "rstrip": True}})
    spaces = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
    assert "\x1c" in spaces
    for space in [*spaces, "\u200b", "\ufeff"]:
        for text in (f"a<|end|>{space}b", f"a{space}<|end|>b"):
            assert codec.encode(text) == codec.encode_whole(text)


def test_words_among_the_added_tokens_do_not_look_like_our_own_marks(tmp_path):
    folder = write_family_model(tmp_path, "qwen3", more_tokens=["SSN", "SOS"])
    chat = ChatFormat.load(folder)
    conversation = Conversation(chat, [ChatMessage(role="user", content="S SSN")])
    conversation.add_completion([5], [-1.0])
    for said in ("my SSN", "S", "SS"):
        conversation.add_messages([ChatMessage(role="user", content=said)])
        text = chat.decode(conversation.prompt_token_ids())
        assert text.endswith(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
        conversation.add_completion([5], [-1.0])
    assert chat.codec.added_ids["SSN"] not in conversation.segments()[0].token_ids


def test_text_is_normalized_as_the_tokenizer_does(tmp_path):
    assert codec_with(tmp_path / "nfc").normalized("e\u0301") == "é"
    plain = ChatFormat.load(write_family_model(tmp_path / "plain", "smollm2")).codec
    assert plain.normalized("e\u0301") == "e\u0301"
