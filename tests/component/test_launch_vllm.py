"""`open_vllm` over a stand-in for the engine's Python, and (slow) over the real one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from prorl_launch.paths import cache_dir, checkout_dir, engine_python, model_dir
from prorl_launch.vllm import default_dtype, open_vllm, vllm_env
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.types.errors import BackendError
from support.skips import because
from support.vllm_stand_in import SERVER

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 30

LAUNCHER = """
import pathlib, sys, trio
from prorl_launch.vllm import open_vllm
async def main():
    python, model, log_file = map(pathlib.Path, sys.argv[1:])
    async with open_vllm(python, model, log_file=log_file) as server:
        print(server.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu sse avx2 avx512f avx512_bf16", "bfloat16"),
        ("fpu amx_bf16 amx_tile", "bfloat16"),
        ("fpu sse avx2 avx512f", "float32"),
        ("", "float32"),
    ],
)
def test_a_cpu_without_bfloat16_is_not_made_to_pretend_it(tmp_path, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    assert default_dtype("cpu", tmp_path / "cpuinfo") == dtype
    assert default_dtype("gpu", tmp_path / "cpuinfo") == "bfloat16"


@pytest.fixture
def engine(tmp_path):
    """Makes a stand-in for the engine's Python, which behaves as told once its HTTP server listens."""

    def make(behaviour: str = "pass", *, server: str = SERVER) -> Path:
        script = tmp_path / "server.py"
        script.write_text(server.replace("BEHAVIOUR", behaviour))
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.02)


async def test_it_serves_until_the_block_is_left(engine, tmp_path):
    with trio.fail_after(TIMEOUT_S):
        async with open_vllm(engine(), Path("/the/model"), log_file=tmp_path / "log", max_model_len=512) as server:
            client = VllmClient(server.url)
            info = await client.probe(timeout_s=5)
            await client.aclose()
            assert (info.model, info.max_model_len) == ("/the/model", 512)
            assert is_alive(server.pid)
        assert not is_alive(server.pid)


async def test_a_given_port_and_options_reach_the_server(engine, tmp_path):
    with trio.fail_after(TIMEOUT_S):
        with_probe = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = with_probe[0].socket.getsockname()[1]
        await with_probe[0].aclose()
        options = ("--seed", "3")
        async with open_vllm(engine(), Path("/m"), log_file=tmp_path / "log", port=port, extra_args=options) as server:
            assert server.url == f"http://127.0.0.1:{port}"
        assert '"--host": "127.0.0.1"' in (tmp_path / "log").read_text()


def test_the_environment_is_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    env = vllm_env()
    assert "A_SECRET" not in env
    assert "PYTHONPATH" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["TORCH_COMPILE_DISABLE"] == "1", "nothing is compiled: a bare machine has no compiler"
    assert env["XDG_CACHE_HOME"].startswith(str(tmp_path))


async def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(engine, tmp_path):
    (tmp_path / "log").write_text("an older run\n")
    python = engine(server="import sys; print('no such model'); sys.exit(3)")
    with trio.fail_after(TIMEOUT_S), pytest.raises(BackendError) as caught:
        async with open_vllm(python, Path("/the/model"), log_file=tmp_path / "log"):
            pytest.fail("ready")
    assert not caught.value.retryable
    for part in ("/the/model", "exit code 3", "no such model", str(tmp_path / "log")):
        assert part in str(caught.value)
    assert "an older run" not in str(caught.value)


async def test_a_server_that_is_never_ready_is_an_error(engine, tmp_path):
    python = engine(server="import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    with trio.fail_after(TIMEOUT_S), pytest.raises(BackendError, match="was not ready within 1 s"):
        async with open_vllm(python, Path("/m"), log_file=tmp_path / "log", startup_timeout_s=1):
            pytest.fail("ready")
    assert not is_alive(int((tmp_path / "log").read_text()))


async def test_a_server_that_drops_token_ids_is_an_error(engine, tmp_path):
    python = engine('engine.inject("drop_token_ids")')
    with trio.fail_after(TIMEOUT_S), pytest.raises(BackendError, match="is unfit"):
        async with open_vllm(python, Path("/m"), log_file=tmp_path / "log"):
            pytest.fail("ready")


async def test_an_engine_that_is_not_installed_is_an_error(tmp_path):
    with trio.fail_after(TIMEOUT_S), pytest.raises(BackendError, match="No such file"):
        async with open_vllm(tmp_path / "none", Path("/m"), log_file=tmp_path / "log"):
            pytest.fail("ready")


async def test_a_cancelled_start_leaves_nothing(engine, tmp_path):
    python = engine(server="import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    log_file = tmp_path / "log"
    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:

            async def start() -> None:
                async with open_vllm(python, Path("/m"), log_file=log_file):
                    pytest.fail("ready")

            nursery.start_soon(start)
            await until(lambda: log_file.exists() and log_file.read_text().endswith("\n"))
            nursery.cancel_scope.cancel()
    assert not is_alive(int(log_file.read_text()))


# ---------------------------------------------------------------- the real engine


def tree(root: int) -> list[int]:
    children = [
        int(pid) for task in Path(f"/proc/{root}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [root, *(pid for child in children for pid in tree(child))]


@pytest.mark.alone
@pytest.mark.slow
async def test_kill_9_of_the_launcher_ends_a_real_vllm_within_5_s(tmp_path):
    if not (engine_python().exists() and model_dir().is_dir()):
        pytest.skip(because(f"no engine or no model in {cache_dir()}", "make engine"))
    argv = [sys.executable, "-c", LAUNCHER, str(engine_python()), str(model_dir()), str(tmp_path / "log")]
    with trio.fail_after(300):
        async with await trio.open_file(tmp_path / "pid", "wb") as report:
            launcher = await trio.lowlevel.open_process(argv, cwd=checkout_dir(), stdout=report.wrapped)
        try:
            await until(lambda: launcher.poll() is not None or (tmp_path / "pid").read_text().endswith("\n"))
            assert launcher.returncode is None, (tmp_path / "log").read_text()[-2000:]
            pids = tree(int((tmp_path / "pid").read_text()))
            assert len(pids) >= 2, "vLLM's engine runs in a process of its own"
        finally:
            launcher.kill()
            with trio.move_on_after(5, shield=True):
                await launcher.wait()
        with trio.fail_after(5):
            await until(lambda: not any(is_alive(pid) for pid in pids))
