"""The program in an answer: which block wins, and what is joined to it."""

from __future__ import annotations

import pytest

from prorl_trio.tasks.handlers.code_answer import choose

F = "def f(n):\n    return n + 1\n"
FENCED = f"```python\n{F}```\n"
READS = "n = int(input())\nprint(n + 1)\n"


@pytest.mark.parametrize(
    ("answer", "names", "program"),
    [
        (F, ["f"], F),
        ("not a program", ["f"], "not a program"),
        (f"Here:\n{FENCED}", ["f"], F),
        (f"{FENCED}Run it:\n```bash\npython solution.py\n```", ["f"], F),
        (f"{FENCED}Usage:\n```python\nprint(f(5))\n```", ["f"], F),
        (f"{FENCED}Output:\n```\n6\n```", ["f"], F),
        (f"```\n{F}```\nOutput:\n```\n6\n```", ["f"], F),
        (f"```python3\n{F}```", ["f"], F),
        (f"```PYTHON\n{F}```", ["f"], F),
        (f"```python\n{F}", ["f"], F),
        (f"~~~\n{F}~~~", ["f"], F),
        (f"```\n{F}```\nUsage:\n```python\nf(1)\n```", ["f"], F),
        (f"```pycon\n>>> f(1)\n```\n```py\n{F}```\n```text\n2\n```", ["f"], F),
        (f"Draft:\n```python\ndef f(n): return 0\n```\nNo:\n{FENCED}", ["f"], F),
        ("```python\nimport math\n```\n```python\ndef f(n): return math.pi\n```", ["f"], None),
        ("```python\nfrom math import *\n```\n```python\ndef f(n): return pi\n```", ["f"], None),
        (
            "```python\ndef g(n): return h(n)\n```\n```python\ndef f(n): return g(n)\n```\n```python\nh = abs\n```",
            ["f"],
            None,
        ),
        (f"{FENCED}Test:\n```python\nassert f(1) == 2\nx = f(2)\n```", ["f"], F),
        (
            f"```python\nclass Solution:\n    def f(self): pass\n```\n{FENCED.replace('f(', 'other(')}",
            ["f"],
            "class Sol",
        ),
        ('```python\ndef f(n):\n    """\n    ```\n    f(1)\n    ```\n    """\n    return 2\n```', ["f"], "def f(n):"),
        (
            '```python\ndef f(n):\n    """\n```\nf(1)\n```\n    """\n    return 2\n```',
            ["f"],
            'def f(n):\n    """\n```\nf(1)',
        ),
        ('def f(n):\n    """\n```\nf(1)\n```\n    """\n    return 2\n', ["f"], 'def f(n):\n    """\n```\nf(1)'),
        (f"```python\n{READS}```\nInput:\n```\n5\n```\nOutput:\n```\n6\n```", [], READS),
        (f"```python\n{READS}```\nTo try it:\n```python\nprint(5)\n```", [], READS),
        ("```python\nprint(1)\n```\n```python\nx = 1\n```", [], "print(1)\n"),
        ("```bash\nls\n```", ["f"], ""),
        ("```python\ndef f(:\n```", ["f"], "def f(:\n"),
    ],
)
def test_the_block_that_is_the_program_wins(answer, names, program):
    code = choose({"answer": answer, "names": names})["code"]
    if program is None:  # all blocks, in their order
        blocks = [each.partition("\n")[2] for each in answer.split("```")[1::2]]
        assert code == "\n".join(blocks)
    else:
        assert code == program or (program and code.startswith(program) and len(program) < 40)
    assert "```" not in code or '"""' in code


def test_joined_blocks_run():
    answer = "```python\ndef f(n): return g(n)\n```\ntext\n```python\nimport math\ndef g(n): return math.floor(n)\n```"
    namespace = {}
    exec(choose({"answer": answer, "names": ["f"]})["code"], namespace)
    assert namespace["f"](1.5) == 1
