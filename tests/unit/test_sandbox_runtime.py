"""The daemon's code as a sandbox gets it."""

from __future__ import annotations

import marshal
import py_compile
import tempfile

import pytest

from prorl_trio.sandbox.runtime import runtime


def test_the_daemon_is_compiled_as_python_does_it_and_without_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: pytest.fail("a killed node would leave it behind"))
    source = b"def f():\n    'Say so.'\n    return 1 + 1\n"
    (tmp_path / "module.py").write_bytes(source)
    py_compile.compile(
        str(tmp_path / "module.py"),
        str(tmp_path / "module.pyc"),
        dfile="/opt/module.py",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    ours, theirs = runtime._bytecode(source, "/opt/module.py"), (tmp_path / "module.pyc").read_bytes()
    assert ours[:16] == theirs[:16]
    assert marshal.loads(ours[16:]) == marshal.loads(theirs[16:])
    names = [name for name, _ in runtime._daemon_files.__wrapped__()]
    assert "prorl_daemon/__main__.py" in names
    assert sum(name.endswith(".pyc") for name in names) == len(names) / 2
