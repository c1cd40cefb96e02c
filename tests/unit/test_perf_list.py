"""`python -m perf`: every benchmark, and what it says of itself."""

from __future__ import annotations

import pytest

from perf.__main__ import find_benchmarks, main


def test_all_benchmarks_are_found_by_what_starts_them(tmp_path):
    (tmp_path / "speed.py").write_text(
        '"""How fast\nit is.\n\nMore."""\nif __name__ == "__main__":\n    sys.exit(run_benchmark(speed))\n'
    )
    (tmp_path / "parts.py").write_text('"""No benchmark: it only names run_benchmark(."""\n')
    assert find_benchmarks(tmp_path) == {"perf.speed": "How fast it is."}
    assert {"perf.balance", "perf.node", "perf.tokens", "perf.tools", "perf.trace"} <= find_benchmarks().keys()
    assert "perf.__main__" not in find_benchmarks()
    assert all(len(said) > 40 for said in find_benchmarks().values())


def test_the_command_lists_them_with_the_machine(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "perf.balance" in printed
    assert "cores" in printed
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--json FILE" in " ".join(capsys.readouterr().out.split())
