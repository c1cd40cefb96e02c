"""Text to token ids and back, such that untrusted text can never become a control token.

A tokenizer first splits its input at its *added tokens* (`<|im_end|>`, `<think>`). The ids of a text are therefore the
ids of the pieces between them, plus the added tokens' own ids. `TokenCodec` does that split itself. Untrusted text is
first `mark`ed: a private-use character breaks up everything that looks like an added token. Marks survive the chat
template and prevent a match of the split. They are removed again before the pieces are encoded, by a tokenizer whose
vocabulary lacks all added tokens.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tokenizers import Tokenizer

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path


MARK = "\ue000"
"""Breaks up look-alikes inside marked text. A MARK in the original text is doubled, so marking is reversible."""

PROBE_CHARS: Final = 64 * 1024
"""Characters of a long text that are encoded at once to check whether it is too long."""
CHARS_PER_TOKEN: Final = 4
"""Characters per token in typical text. A text with fewer characters per allowed token is encoded as a whole."""
SHORT_CHARS: Final = 24
SHORT_TEXTS: Final = 1024
"""Size of the cache of ids for short texts, because a template writes the same texts in each turn."""

MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"})
"""The tags around reasoning and calls in most families."""

_HTML_TAG = re.compile(
    "</?(?:a|b|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|span|strong|sub|sup|table|tbody|td"
    "|tfoot|th|thead|tr|u|ul)>"
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKS = re.compile(f"{MARK}({MARK}?)")
_SPACE = r"[^\S\x1c-\x1f]*"
"""White space that an added token with `lstrip` or `rstrip` swallows, as defined by Unicode, not by Python."""


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256, in hexadecimal, of the ids of all tokens, including added tokens.

    The mapping is `get_vocab()` of a `transformers` tokenizer, or `get_vocab(with_added_tokens=True)` of a `tokenizers`
    one. A vocabulary of 150,000 tokens takes about 0.1 s.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=itemgetter(1)):
        digest.update(b"%d %s\n" % (token_id, token.encode(errors="surrogatepass")))
    return digest.hexdigest()


class _AddedToken(msgspec.Struct, frozen=True):
    """An entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    lstrip: bool = False
    rstrip: bool = False
    special: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it is mere text: one character, white space, or an HTML tag (Gemma has `\n\n` and `<b>`)."""
        if len(self.content) == 1 or not self.content.strip(" \t\r\n\u2581"):
            return True
        return not self.special and _HTML_TAG.fullmatch(self.content) is not None

    @property
    def is_structural(self) -> bool:
        """Whether it may structure a dialogue: it is special, or looks special (DeepSeek's are not marked special)."""
        return not self.is_text and (self.special or "|" in self.content or "｜" in self.content)


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json that are read here."""

    model: dict[str, Any]
    added_tokens: list[_AddedToken] = []


class TokenCodec:
    """Encodes marked text, decodes ids. Immutable; may be used from several threads.

    Attributes:
        vocab_size: upper bound of the tokenizer's ids, exclusive. The model's embedding may have more rows.
        vocabulary: the digest of its ids; see `vocabulary_digest`.
        longest_token_chars: length of the longest token in characters.
        added_ids: the ids of all added tokens, by their text.
        look_alikes: the added tokens that are broken up in untrusted text.
        control_pattern: matches the tokens that structure a dialogue, in rendered text.
    """

    vocab_size: int
    vocabulary: str
    longest_token_chars: int
    added_ids: dict[str, int]
    look_alikes: list[str]
    control_pattern: re.Pattern[str]

    def __init__(self, tokenizer_json: bytes, origin: Path, markup: Collection[str] = MARKUP) -> None:
        """Build from the content of a `tokenizer.json`.

        Args:
            tokenizer_json: the content.
            origin: its path, for messages.
            markup: tokens that belong to the text of an assistant, even if they are special.

        Raises:
            ConfigError: it is not a BPE tokenizer, or does not split at its added tokens as described above.
        """
        try:
            spec = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{origin}: not a tokenizer file: {exc}") from exc
        if spec.model.get("type") != "BPE" or not isinstance(spec.model.get("vocab"), dict):
            raise ConfigError(f"{origin}: only BPE tokenizers are supported, this is {spec.model.get('type')!r}")
        self.added_ids = {token.content: token.id for token in spec.added_tokens if token.content}
        self._control_ids = {t.id for t in spec.added_tokens if t.is_structural and t.content not in markup}
        breakable = [t for t in spec.added_tokens if t.content and not t.is_text]
        self._full, self._plain = _tokenizers(tokenizer_json, frozenset(t.content for t in breakable), origin)
        self._short = lru_cache(maxsize=SHORT_TEXTS)(self._encode_anew)
        ids = self._full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.longest_token_chars = max(map(len, ids))
        self.vocabulary = vocabulary_digest(ids)
        self._look_alike = _break_pattern(t.content for t in breakable)
        self.look_alikes = [t.content for t in breakable]
        control = [t.content for t in breakable if t.id in self._control_ids]
        self._control_look_alike = _break_pattern(control)
        self.control_pattern = re.compile(_longest(control) or r"(?!)")
        self._openings = {t.content[:n] for t in breakable for n in range(1, len(t.content))}
        self._longest_opening = max((len(opening) for opening in self._openings), default=0)
        self._split = _split_pattern(spec.added_tokens)
        self._check_split(origin)

    def mark(self, text: str, *, speech: bool = False) -> str:
        """Return `text` marked so that no part becomes a control token. Lone surrogates become U+FFFD.

        Args:
            text: untrusted text, such as a tool's output or a question.
            speech: the text is an assistant's turn, whose `<think>` and `<tool_call>` are intended; only tokens that
                structure the dialogue are broken up.
        """
        text = _LONE_SURROGATE.sub("\ufffd", text).replace(MARK, MARK * 2)
        text = (self._control_look_alike if speech else self._look_alike).sub(rf"\g<0>{MARK}", text)
        if any(text[-n:] in self._openings for n in range(1, min(self._longest_opening, len(text)) + 1)):
            text += MARK  # else the template's next text could complete a token
        return text

    def unmarked(self, marked: str) -> str:
        """Return the original of marked text, except lone surrogates."""
        return _MARKS.sub(r"\1", marked) if MARK in marked else marked

    def mark_strings(self, value: Any) -> Any:
        """Return a JSON value with all strings marked, including keys."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark(str(key)): self.mark_strings(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_strings(item) for item in value]
        return value

    def encode(self, marked: str) -> list[int]:
        """Return the ids of rendered text, in linear time."""
        ids: list[int] = []
        start = 0
        for match in self._split.finditer(marked):
            ids += self._encode_plain(marked[start : match.start()])
            ids.append(self.added_ids[match.group(match.lastindex or 0)])
            start = match.end()
        ids += self._encode_plain(marked[start:])
        return ids

    def count_beyond(self, marked: str, at_most: int) -> int:
        """Return a lower bound of the number of tokens in rendered text if it surely exceeds `at_most`, else 0.

        The library holds the interpreter's lock for a second per million characters, which blocks the whole process,
        including heartbeats. A text that is far too long must therefore not be encoded: only a part is encoded
        here, in pieces.
        """
        if len(marked) <= max(PROBE_CHARS, CHARS_PER_TOKEN * at_most):
            return 0
        if (found := len(marked) // self.longest_token_chars) > at_most:
            return found
        found = 0
        for start in range(0, len(marked), PROBE_CHARS):
            found += len(self.encode(marked[start : start + PROBE_CHARS]))
            if found > at_most + at_most // 4:  # the cuts between the pieces add a few tokens
                return found
        return 0

    def encode_whole(self, text: str) -> list[int]:
        """Return the ids that the plain tokenizer assigns to rendered text, including all control tokens."""
        ids: list[int] = self._full.encode(text, add_special_tokens=False).ids
        return ids

    def normalized(self, text: str) -> str:
        """Return `text` as the tokenizer normalises it before encoding (Qwen's composes accents: NFC)."""
        normalizer = self._full.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids out of range are dropped.

        `skip_special` drops the tokens that structure the dialogue, but not an assistant's markup.
        """
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self._control_ids]
        return str(self._full.decode(ids, skip_special_tokens=False))

    def _encode_plain(self, marked: str) -> Sequence[int]:
        if not marked:
            return ()
        return self._short(marked) if len(marked) <= SHORT_CHARS else self._encode_anew(marked)

    def _encode_anew(self, marked: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(self.unmarked(marked), add_special_tokens=False).ids)

    def _check_split(self, origin: Path) -> None:
        """Prove on samples that our split yields the ids of the whole tokenizer, with all flags of its tokens."""
        if self._plain.encode("a", add_special_tokens=False).tokens[0].startswith(("\u2581", "\u0120")):
            raise ConfigError(
                f"{origin}: this tokenizer puts a space before every text (SentencePiece's dummy prefix, or "
                "add_prefix_space), so that a text has other ids alone than after another one; token-exact rendering "
                "cannot be guaranteed with it"
            )
        for content in self.added_ids:
            for text in (f"Hi{content}there", f"Hi {content}\n there", f"{content}{content} "):
                if self.encode(text) != self._full.encode(text, add_special_tokens=False).ids:
                    raise ConfigError(
                        f"{origin}: text around the added token {content!r} is not encoded piece by piece "
                        "(a single_word or normalized token?); token-exact rendering cannot be guaranteed with it"
                    )


def _tokenizers(tokenizer_json: bytes, added: frozenset[str], origin: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return the original tokenizer, and a tokenizer without added tokens and without `added` in its vocabulary."""
    spec = msgspec.json.decode(tokenizer_json)
    # Some vocabularies contain control tokens: remove these, so that merges cannot build one from plain text.
    bare_vocab = {text: token_id for text, token_id in spec["model"]["vocab"].items() if text not in added}
    spec |= {"added_tokens": [], "post_processor": None, "model": {**spec["model"], "vocab": bare_vocab}}
    try:
        full, bare = Tokenizer.from_buffer(tokenizer_json), Tokenizer.from_buffer(msgspec.json.encode(spec))
    except ValueError as exc:
        raise ConfigError(f"{origin}: cannot be loaded: {exc}") from exc
    for tokenizer in (full, bare):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return full, bare


def _break_pattern(contents: Iterable[str]) -> re.Pattern[str]:
    """Match the first character of every occurrence of `contents`, including overlapping ones."""
    rests: dict[str, list[str]] = {}
    for content in contents:
        rests.setdefault(content[0], []).append(content[1:])
    return re.compile("|".join(f"{re.escape(c)}(?={_longest(rest)})" for c, rest in rests.items()) or r"(?!)")


def _split_pattern(tokens: Iterable[_AddedToken]) -> re.Pattern[str]:
    """Match an added token, leftmost and longest, with the space it swallows; the matched group has its text."""
    longest_first = sorted((t for t in tokens if t.content), key=lambda t: -len(t.content))
    swallowing = [
        (_SPACE if t.lstrip else "") + f"({re.escape(t.content)})" + (_SPACE if t.rstrip else "")
        for t in longest_first
        if t.lstrip or t.rstrip
    ]
    others = [t.content for t in longest_first if not (t.lstrip or t.rstrip)]
    return re.compile("|".join([*swallowing, *([f"({_longest(others)})"] if others else [])]) or r"(?!)")


def _longest(contents: Iterable[str]) -> str:
    """Return the source of a pattern for the longest of `contents`. It is a trie, because some have thousands."""
    rests: dict[str, list[str]] = {}
    ends = False
    for content in contents:
        if content:
            rests.setdefault(content[0], []).append(content[1:])
        else:
            ends = True
    branches = [re.escape(first) + _longest(rest) for first, rest in rests.items()]
    if not branches:
        return ""
    return branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)}{'|' if ends else ''})"
