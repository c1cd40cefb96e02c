# ruff: noqa: RUF001 - a Chinese colon
"""Find the final answer in a text. Pure, and linear in the text, because it also runs on the node's event loop."""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

MAX_TAIL_CHARS: Final = 32_768
"""The final answer is searched in this many characters at the end of a text."""

MAX_ANCHORS: Final = 100
"""Number of phrases at the end of a text that are checked for an answer."""

_BOX: Final = re.compile(r"\\f?box(?:ed)?\s*(?P<open>\{)|\\boxed\s+(?P<bare>[^\s{}\\$]+)|\\.|[{}]", re.DOTALL)
_BETWEEN: Final = re.compile(r"(?:[\s$,;]|\\[()]|\\q?quad|\\text(?:rm)?\s*\{\s*(?:and|or|,)\s*\}|and|or)*")
_ANCHOR: Final = re.compile(
    r"(?:(?<![A-Za-z])answer\b[*_ \t]*(?:(?:is|are|equals|(?:should|must|will|would) be)\b\s*:?|[:=])"
    r"|final answer[*_ \t]*\n|####|答案\s*(?:是|为|[:：]))[\s*_}]*",
    re.IGNORECASE,
)
_TURNED: Final = re.compile(
    r"(?:(?<![A-Za-z])(?:of|than|times|twice|half|double|triple|no|neither|suppose|assume|assuming|doubt|if|when|wrong"
    r"|incorrect|false|minus|plus|over|by|to)|[-+/])\s+(?:that\s+)?(?:(?:the|my|our|its|this|an?)\s+)?"
    r"(?:(?:final|correct|right|true)\s+)*$",
    re.IGNORECASE,
)
"""Words before "answer" that give a sentence another meaning."""
_TAGGED: Final = re.compile(r"<((?:final_)?answer)>((?:(?!</?(?:final_)?answer>).)*)</\1>", re.IGNORECASE | re.DOTALL)
_DISPLAY: Final = re.compile(r"\s*(?:\\\[(.*?)\\\]|\$\$(.*?)\$\$)", re.DOTALL)
_SENTENCE_END: Final = re.compile(r"(?<=[^\s.])[.!](?=\s+[A-Z]|\s*$)|\n")
_DOUBLED: Final = re.compile(
    r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|boxed|text[a-z]*|math[a-z]+|pi|cdot|times|left|right|begin|end|infty|circ|pm|[lgn]eq?"
    r"|cup|cap|theta|alpha|ln|log|sin|cos|tan|binom)(?![A-Za-z]))"
)
"""A command whose backslash was escaped twice."""
_TAKEN_BACK: Final = re.compile(
    r"(?:^|(?<=[.!?;\n]))\W{0,8}(?:oh|no|hmm*|wait|actually|correction|sorry|scratch that|or|maybe|perhaps"
    r"|alternatively|otherwise|another)(?![A-Za-z])|(?<![A-Za-z])(?:could|might|may|should|instead|rather|or)(?![A-Za-z])[^.\n]*\d"
    r"|(?<=\n)[ \t$*-]*\d[\d.,/]*[ \t$*.]*(?:$|\n)",
    re.IGNORECASE,
)
"""Words after an answer that may revoke it or add another one."""
_REASON: Final = re.compile(
    r"(?:,\s*(?:as|since|because|which|where|so|for)\b|\s+(?:because|since)\b|,\s*not\b"
    r"|;\s+(?:I|we|it|this|that|so|as|because|since|here|note|hence|thus|checked|verified)\b).*"
    r"|(?<=[\w}$%])\s+\((?:(?:since|because|as|i\.e\.|that is|rounded|approx\w*|about)\b.*"
    r"|[\d\s.+*/=\u00d7\u00b7\u00f7-]*[+*/\u00d7\u00b7\u00f7-][\d\s.+*/=\u00d7\u00b7\u00f7-]*)\)$",
    re.DOTALL,
)
_STANDING_ALONE: Final = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")


def extract_boxed(text: str) -> str | None:
    """Return the content of the last non-empty `\\boxed{...}` (or `\\fbox{...}`) with balanced braces.

    Boxes separated only by a comma, "and" or "or" form one answer. A nested box belongs to the outer box. Returns None
    without a box in the last `MAX_TAIL_CHARS` characters.
    """
    tail = text[-MAX_TAIL_CHARS:]
    boxes: list[tuple[int, int, str]] = []  # start, end, content
    opened: list[tuple[int, int]] = []  # start of the box, or -1; start of its content
    first = min((at for at in (tail.find("\\boxed"), tail.find("\\fbox")) if at >= 0), default=len(tail))
    for found in _BOX.finditer(tail, first):
        if found["open"]:
            opened.append((found.start(), found.end()))
        elif found["bare"]:
            boxes.append((found.start(), found.end(), found["bare"].rstrip(".,;")))
        elif found[0] == "{":
            opened.append((-1, 0))
        elif found[0] == "}" and opened:
            start, content = opened.pop()
            if start < 0:
                continue
            while boxes and boxes[-1][0] > start:
                boxes.pop()
            if tail[content : found.start()].strip():
                boxes.append((start, found.end(), tail[content : found.start()].strip()))
    if not boxes:
        return None
    answer = [boxes[-1]]
    while len(boxes) > len(answer):
        before = boxes[-len(answer) - 1]
        between = tail[before[1] : answer[0][0]]
        if not between.strip(" $\n\\()") or len(between) > 40 or not _BETWEEN.fullmatch(between):
            break
        answer.insert(0, before)
    return ", ".join(content for *_, content in answer)


def find_final_answer(text: str) -> str:
    """Return the answer in a final text: in a box, in `<answer>`, after `####` or "the answer is", or the whole text.

    The answer after "the answer is" ends with its sentence, or before its reason ("because ...", "(since ...)"), unless
    a later sentence may revoke it. Only the last `MAX_TAIL_CHARS` characters are read.
    """
    text = text[-MAX_TAIL_CHARS:]
    if "\\\\" in text:
        text = _DOUBLED.sub(r"\\", text)
    if (boxed := extract_boxed(text)) is not None:
        return boxed
    if tagged := _TAGGED.findall(text):
        text = tagged[-1][1]
    text = text.replace("\\boxed{}", "").strip().removeprefix("\\boxed{")  # never closed
    anchors = islice(reversed(list(_ANCHOR.finditer(text))), MAX_ANCHORS)
    anchor = next(
        (each for each in anchors if not _TURNED.search(text[max(0, each.start() - 80) : each.start()])), None
    )
    if anchor is None:
        return text
    rest = text[anchor.end() :].strip()
    if "\n" in anchor[0]:
        rest = re.sub(r"^[-+•]\s+", "", rest)  # a list item
    if (display := _DISPLAY.match(rest)) is not None:
        return (display[1] or display[2] or "").strip()
    end = _SENTENCE_END.search(rest)
    sentence = " ".join((rest[: end.start()] if end and not _TAKEN_BACK.search(rest, end.end()) else rest).split())
    return _REASON.sub("", sentence).strip()


def last_number(text: str) -> str | None:
    """Return the last number of `text` that is a separate word, in digits; None without one. `3 + 4 = 7.` gives `7`."""
    numbers = _STANDING_ALONE.findall(text[-MAX_TAIL_CHARS:])
    return numbers[-1] if numbers else None
