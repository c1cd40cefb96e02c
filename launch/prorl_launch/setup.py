"""`make setup` and `prorl-trio setup`: all steps from a bare Debian or Ubuntu to the first rollout.

Run as `python -m prorl_launch.setup [dev] [engine] [train] [--engine cpu|gpu]` in the checkout, with the Python for the
environments. Completed parts are skipped until their inputs change. All parts except `dev` and `apptainer` write only
to the cache folder. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from typing import TYPE_CHECKING, get_args

from prorl_launch import environments, model, paths, venv
from prorl_launch.locks import lock_path, locked_pip
from prorl_launch.progress import SetupError, run_step, say
from prorl_launch.userns import user_namespace_problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_RECIPE = 2
_PARTS = ("dev", "runtime", "engine", *get_args(environments.TrainerKind), "nemo-gym", "apptainer")

_COMPILE = """
import compileall, re, sysconfig
seldom = re.compile(r"/tests?/|/transformers/models/|/site-packages/(google|openai|anthropic)/")
compileall.compile_dir(sysconfig.get_path("purelib"), rx=seldom, quiet=2, workers=0)
"""
"""Compiles on all cores. Sandboxes mount these modules read-only, so they could not store bytecode. The half of the
modules that programs rarely import is skipped."""

_OFFLINE_HINT = "Nothing is lost: with the network back, the same command goes on from here."
_TORCH_HINT = (
    "If pip found no such torch: PyTorch publishes its CPU builds in a package index of their own, which its page "
    "'Get Started' names (Linux, Pip, CPU). Set PIP_EXTRA_INDEX_URL to it, or PIP_FIND_LINKS to a folder of wheels."
)


def setup_dev(checkout: Path) -> None:
    """Create `checkout/.venv` with this project (editable) and everything for tests and demo. Takes 1 to 2 minutes."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    facts = [_RECIPE, project["project"], project["build-system"], lock_path("dev").read_text()]
    facts += [sys.implementation.cache_tag, str(checkout)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    editable = ["--no-deps", "--no-build-isolation", "--no-index", "--editable", str(checkout)]
    steps = [
        ("what the project and its tools need", locked_pip("dev", environments.dev_requirements(checkout))),
        ("compiling", ["-c", _COMPILE]),
        ("the project", ["-m", "pip", "install", *editable]),
    ]
    venv.install(checkout / ".venv", key, steps, log_file=_log_file("dev"), hint=_OFFLINE_HINT)


def setup_runtime(python: str) -> None:
    """Build the runtime for images other than `host` from the environment of `python`. Takes some seconds.

    A failure is only a warning: the node works without the runtime, but cannot start such images.
    """
    argv = [python, "-m", "prorl_launch.bundle"]
    if subprocess.run([*argv, "--is-made"], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        return
    try:
        run_step("the runtime for sandbox images", argv, log_file=_log_file("runtime"))
    except SetupError as error:
        say(f"WARNING: sandboxes can have the image `host` only.\n{error}")


def setup_environment(environment: environments.Environment, checkout: Path) -> None:
    """Create an environment in the cache folder. First print the time, with fast downloads, and the disk space."""
    folder = paths.environment_dir(environment)
    key = environment.key(checkout)
    if venv.is_complete(folder, key):
        return
    paths.cache_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.cache_dir()).free
    need = f"{environment.disk_bytes / 1e9:.0f} GB"
    if free < environment.disk_bytes:
        raise SetupError(
            f"{environment.lock} needs {need} free in {paths.cache_dir()}, "
            f"which has {free / 1e9:.1f} GB; set PRORL_CACHE_DIR to a folder on a larger disk"
        )
    say(f"{environment.lock}: about {environment.minutes:g} minutes and up to {need} in {folder}")
    hint = f"{_TORCH_HINT}\n{_OFFLINE_HINT}" if environment.torch_cpu else _OFFLINE_HINT
    venv.install(folder, key, environment.install_steps(checkout), log_file=_log_file(environment.lock), hint=hint)


def setup_model(kind: environments.EngineKind) -> None:
    """Convert the default policy with the engine's torch and transformers. Takes about 20 s."""
    folder = paths.model_dir()
    if model.is_converted(folder):
        return
    with venv.exclusive(folder.parent) as lock:
        if model.is_converted(folder):
            return
        argv = [str(paths.engine_python(kind)), "-I", model.__file__, str(folder)]
        run_step(f"converting {folder.name}", argv, log_file=_log_file("model"), keep_open=[lock])
        if broken := model.broken_files(folder):
            raise SetupError(f"the converted model in {folder} is not whole: {', '.join(broken)}")


def setup_apptainer() -> None:
    """Install Apptainer on Debian or Ubuntu, by root or sudo. Raises SetupError; the script prints the reason."""
    script = paths.apptainer_script()
    if code := subprocess.run(["bash", str(script)], check=False).returncode:
        raise SetupError(f"{script.name} ended with exit code {code}")


def set_up(parts: Sequence[str], engine: environments.EngineKind) -> int:
    """Run these parts of `_PARTS`, and print the progress.

    Returns:
        The exit code: 0 when all are complete, 1 with a message otherwise, 130 after Ctrl-C.
    """
    started = time.monotonic()
    checkout = paths.checkout_dir()
    try:
        if "dev" in parts:
            setup_dev(checkout)
            setup_runtime(str(checkout / ".venv/bin/python"))
        if "runtime" in parts:
            setup_runtime(sys.executable)
        if "engine" in parts:
            setup_environment(environments.engine_environment(engine), checkout)
            setup_model(engine)
        for trainer in get_args(environments.TrainerKind):
            if trainer in parts:
                _setup_trainer(environments.trainer_environment(trainer, engine), checkout)
        if "nemo-gym" in parts:
            _setup_trainer(environments.nemo_gym_environment(), checkout)
        if "apptainer" in parts:
            setup_apptainer()
    except SetupError as error:
        say(f"ERROR\n{error}")
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        say(f"ERROR\n{error.filename}: {error.strerror}; the cache folder is {paths.cache_dir()} (PRORL_CACHE_DIR)")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return 130
    _warn_without_user_namespaces()
    say(f"{' and '.join(parts)} ready ({time.monotonic() - started:.1f} s)")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested parts, see `set_up`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prorl_launch.setup", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="|".join(_PARTS), help="what to set up (default: dev engine)")
    parser.add_argument("--engine", choices=get_args(environments.EngineKind), default=paths.default_engine())
    options = parser.parse_args(argv)
    parts = options.parts or ["dev", "engine"]
    if unknown := set(parts) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return set_up(parts, options.engine)


def _setup_trainer(environment: environments.Environment, checkout: Path) -> None:
    newest, oldest, here = environment.newest_python, environment.oldest_python, sys.version_info[:2]
    if here < oldest:
        say(f"{environment.lock}: published for Python {oldest[0]}.{oldest[1]} and later; what needs it is skipped")
        return
    if newest is not None and here > newest:
        say(f"{environment.lock}: not published for a Python after {newest[0]}.{newest[1]}; what needs it is skipped")
        return
    setup_environment(environment, checkout)


def _warn_without_user_namespaces() -> None:
    if problem := user_namespace_problem():
        from prorl_trio.sandbox.providers.userns import user_namespace_remedy  # imports the standard library only

        say(f"WARNING: no rootless sandbox can start here ({problem}). What to do: {user_namespace_remedy()}")
        say("WARNING: `prorl-trio doctor` reports whether a sandbox works all the same")


def _log_file(part: str) -> Path:
    return paths.cache_dir() / "logs" / f"setup-{part}.log"


if __name__ == "__main__":
    sys.exit(main())
