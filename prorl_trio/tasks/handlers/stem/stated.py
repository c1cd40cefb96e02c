"""Find the answer that a text states: in its last box or answer tag, after "the answer is", or the whole text. Pure."""

from __future__ import annotations

import re
from typing import Final

from prorl_trio.tasks.handlers.final_answer import extract_boxed

MAX_BETWEEN_CHARS: Final = 24
_ANCHOR: Final = re.compile(
    r"(?:答案\s*(?:是|为|[:：])|(?<![A-Za-z])(?:answer|choice|option)"  # noqa: RUF001 - Chinese punctuation
    r"(?:\s+(?:is|equals|should be|must be|would be)(?![A-Za-z])\s*:?"
    r"|[\"']?\s{0,3}[:=])|####(?!#)|(?m:^)[#*_ ]{0,8}(?:(?:final|correct|my)\s)?answer[*_ ]{0,4}\n)"
    r"(?:[*_]{1,3}(?=\s))?\s*",
    re.IGNORECASE,
)
_TAG: Final = re.compile(r"<\s*(?:final[_ ]?)?answer\s*>", re.IGNORECASE)
_TAG_END: Final = re.compile(r"<\s*/\s*(?:final[_ ]?)?answer\s*>", re.IGNORECASE)
_NEXT_BOX: Final = re.compile(r"\}?\s*\$?\s*(?:,|;|/|or|and|\\text\s*\{\s*(?:or|and)\s*\})?\s*\$?\s*", re.IGNORECASE)
REASON: Final = re.compile(
    r"(?:[,;:.]|\s[-–—])?\s{0,4}\(?(?<![A-Za-z])(?:(?:because|since|as(?!\s+(?:well|is|are|does|do)(?![A-Za-z]))|"  # noqa: RUF001
    r"due to|where|which|given that|so that|"
    r"for the reason)(?![A-Za-z])|(?:explanation|reason|reasoning|justification|rationale)\s?:)",
    re.IGNORECASE,
)
_RETRACTION: Final = re.compile(
    r"(?<=[.!?,;\n])\s{0,4}(?:(?:oh|no|hmm|hm)[\s,.!]{0,4}){0,3}(?:wait|actually|correction|sorry|scratch that)"
    r"(?![A-Za-z])[\s,.:!-]*(?:no(?![A-Za-z])[\s,.:-]*)?(?:(?:it(?: is|'s)|the (?:correct )?answer is)(?![A-Za-z]))?",
    re.IGNORECASE,
)
"""A phrase that revokes the answer before it."""
_SENTENCE_END: Final = re.compile(r"(?<=[^\s.])(?<![^\w][A-Za-z])[.!?](?=\s+(?:[A-Z][A-Za-z']*\s+\S|[\\$(*]))|\n")
HEDGES: Final = re.compile(
    r"(?<![A-Za-z])(?:or|nor|either|neither|but|however|maybe|perhaps|possibly|alternatively|alternative|instead|wait|"
    r"actually|correction|unless|except|rather|not|no|never|wrong|incorrect|false|might|could|may|unsure|if|otherwise)"
    r"(?![A-Za-z])|n['’]t(?![A-Za-z])",  # noqa: RUF001 - typed by people
    re.IGNORECASE,
)
"""Words after an answer that may revoke it or add another one."""


def stated_answers(text: str) -> list[str]:
    """Return possible answers stated in a text, best first; the caller uses the first that it understands.

    A box comes first, followed by the text after a later anchor, because a box may hold an intermediate formula.
    Without a box: an answer tag, an anchor, and the whole text. Consecutive boxes joined by "or" or a comma are one
    statement of several answers. A sentence after an answer that revokes it, or may do so, belongs to it.
    """
    boxed = extract_boxed(text)
    if boxed is not None:
        at, end_of_box = place_of_box(text, boxed)
        before = text[: text.rfind("\\", 0, at)] if at > 0 else ""
        previous = extract_boxed(before)
        if previous is not None:
            end = before.rfind(previous) + len(previous)
            between = before[end:]
            if len(between) <= MAX_BETWEEN_CHARS and _NEXT_BOX.fullmatch(between):
                return [f"{previous} , {boxed}"]
        behind = _anchored(text[end_of_box:])
        inside = _anchored(boxed) or _in_tag(boxed)
        return [boxed, *([behind] if behind else []), *([inside] if inside else [])]
    if tagged := _in_tag(text):
        return [tagged]
    anchored = _anchored(text)
    return [anchored] if anchored else [text.strip()]


def _in_tag(text: str) -> str:
    tags = list(_TAG.finditer(text))
    if not tags:
        return ""
    rest = text[tags[-1].end() :]
    end_tag = _TAG_END.search(rest)
    return rest[: end_tag.start()].strip() if end_tag else rest.strip()


def place_of_box(text: str, boxed: str) -> tuple[int, int]:
    """Return the start and the end of the content of a text's last box."""
    at = text.rfind("{" + boxed)
    at = at + 1 if at >= 0 else text.rfind(boxed)
    return at, at + len(boxed)


def _anchored(text: str) -> str:
    anchors = list(_ANCHOR.finditer(text))
    if not anchors:
        return ""
    rest = text[anchors[-1].end() :].strip()
    if rest.count("**") % 2:  # `**Answer: C**`
        head, _, tail = rest.rpartition("**")
        rest = head + tail
    taken_back = list(_RETRACTION.finditer(rest))
    return first_sentence(rest[taken_back[-1].end() :].strip() if taken_back else rest)


def first_sentence(text: str) -> str:
    """Return the first sentence if the rest does not revoke it or state more numbers; else the whole text."""
    end = _SENTENCE_END.search(text)
    if end is None or HEDGES.search(text, end.end()) or re.search(r"\d", text[end.end() :]):
        return text
    return text[: end.start()].strip()


def without_reason(text: str) -> str:
    """Return a text without the reason at its end (`..., because ...`)."""
    found = REASON.search(text)
    if found is None or not text[: found.start()].strip() or HEDGES.search(text[: found.start()]):
        return text
    return text[: found.start()].strip()
