"""Fenced blocks in texts: where they begin, where they end, and what is in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_trio.agent.fences import PYTHON, fenced_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\n```python\nx\n```\nb", [("python", "x\n")]),
        ("```python3\nx\n```", [("python3", "x\n")]),
        ("```Python\nx\n```", [("python", "x\n")]),
        ("``` py \nx\n```", [("py", "x\n")]),
        ('```python title="a.py"\nx\n```', [("python", "x\n")]),
        ("```{.python}\nx\n```", [("python", "x\n")]),
        ("```\nx\n```", [("", "x\n")]),
        ("~~~python\nx\n```\n~~~", [("python", "x\n```\n")]),
        ("````python\n```\nx\n```\n````", [("python", "```\nx\n```\n")]),
        ("```python\nx\n`````  ", [("python", "x\n")]),
        ("```python\r\nx\r\ny\r\n```\r\n", [("python", "x\ny\n")]),
        ('```python\nprint("```")\n```', [("python", 'print("```")\n')]),
        ("- ```python\n  if x:\n      y\n  ```", [("python", "if x:\n    y\n")]),
        ("1. Do it:\n\n   ```python\n   x\n     y\n   ```\n", [("python", "x\n  y\n")]),
        ("        ```python\n        x\n        ```\n", [("python", "x\n")]),
        ('```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```', None),
        ("```python\nx", [("python", "x")]),
        ("```python\nx\n```\n```bash\ny\n```", [("python", "x\n"), ("bash", "y\n")]),
        ("say `x` or ```inline``` or ``` a ` b", []),
        ("text ```python\nx\n```", [("", "")]),
        ("```python", [("python", "")]),
        ("", []),
    ],
)
def test_blocks_are_read_as_commonmark_has_them(text, blocks):
    found = [(each.language, each.code) for each in fenced_blocks(text)]
    if blocks is None:
        blocks = [("python", text[len("```python\n") : -len("```")])]
    assert found == blocks


def test_a_block_knows_its_place_and_whether_it_is_closed():
    text = "a\n```python\nx\n```\nb\n```py\ny"
    first, second = fenced_blocks(text)
    assert text[first.start : first.end] == "```python\nx\n```\n"
    assert (first.closed, first.raw) == (True, "x\n")
    assert (second.closed, second.raw, text[second.start :]) == (False, "y", "```py\ny")
    assert {first.language, second.language} <= PYTHON


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["```", "~~~", "python", "\n", "\r\n", "  ", "x", "- ", "`"]), max_size=30).map("".join)
)
def test_blocks_are_parts_of_the_text_in_order(text):
    end = 0
    for block in fenced_blocks(text):
        assert end <= block.start < block.end <= len(text)
        assert block.raw in text[block.start : block.end]
        end = block.end
