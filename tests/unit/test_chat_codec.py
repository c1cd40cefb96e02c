"""Text to ids and back: what is text stays text, in the ids that the tokenizer itself gives to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prorl_trio.chat.codec import TokenCodec
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.types.errors import ContextLengthExceeded
from prorl_trio.types.models import ChatMessage
from support.chat_families import write_family_model


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


LONG = {
    "words": "hello world " * 100_000,
    "one word": "x" * 1_000_000,
    "one line": "1,2;3 " * 200_000,
    "spaces": " " * 40_000_000,
}


@pytest.mark.parametrize("name", LONG)
def test_a_text_that_is_far_too_long_is_not_encoded_whole(tmp_path, monkeypatch, name):
    """The library would hold the interpreter's lock for a second for each million characters."""
    text, encoded = LONG[name], []
    chat = ChatFormat.load(write_family_model(tmp_path, "qwen3"))
    encode = chat.codec.encode
    monkeypatch.setattr(TokenCodec, "encode", lambda self, marked: encoded.append(len(marked)) or encode(marked))
    for role in ("user", "system"):
        with pytest.raises(ContextLengthExceeded, match=r"no room in a context of 4000"):
            Conversation(
                chat, [ChatMessage(role=role, content=text), ChatMessage(role="user", content="?")], at_most=4000
            )
    conversation = Conversation(chat, [ChatMessage(role="user", content="?")], at_most=4000)
    conversation.add_completion([1, 2, 3], [0.0] * 3)
    with pytest.raises(ContextLengthExceeded):
        conversation.continue_from([ChatMessage(role="user", content=text)], "compaction", at_most=4000)
    assert conversation.count_beyond([ChatMessage(role="tool", content=text)], 4000) > 4000
    assert sum(encoded) < 700_000


def test_a_text_that_fits_is_never_too_long(tmp_path):
    codec = ChatFormat.load(write_family_model(tmp_path, "qwen3")).codec
    for text in ("hello world " * 10_000, "x" * 100_000, " " * 200_000, "\n\t" * 50_000):
        count = len(codec.encode(text))
        for at_most in (count, count + 1, 2 * count):
            assert codec.count_beyond(text, at_most) == 0
        assert codec.count_beyond(text, count // 8) in (0, *range(count // 8 + 1, 2 * count))
