"""`python -m sandbox_daemon --socket PATH`: see `--help`."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

__all__ = ["main"]

USAGE_ERROR = 2


def main() -> int:
    """Run the daemon; returns its exit code: 0 at the end of its connection, 2 if it was started wrongly."""
    options = _parse_options()
    if options.guard:
        from sandbox_daemon.guard import stay_behind

        stay_behind()

    import trio

    from sandbox_daemon.daemon import serve_daemon
    from sandbox_daemon.limits import hide_self, limit_self
    from sandbox_daemon.memory_files import start_maker
    from sandbox_daemon.privileges import drop_privileges
    from sandbox_daemon.seccomp import confine
    from sandbox_daemon.settings import read_start_line

    try:
        start = read_start_line(0, timeout_s=options.accept_timeout_s)
        if start is None:
            return 0
        if not start.token:
            raise ValueError("the token is empty")
        if not options.socket and start.listen_fd < 0:
            raise ValueError("neither --socket nor the start line's listen_fd says where to listen")
        if start.cwd and not os.path.isdir(start.cwd):
            raise ValueError(f"cwd {start.cwd!r} is not a directory")
        if start.fakeroot:
            drop_privileges()
        if start.isolated:
            start_maker()
            confine()
        limit_self(start.limits)
        hide_self()
        trio.run(
            partial(
                serve_daemon,
                options.socket,
                start,
                accept_timeout_s=options.accept_timeout_s,
                stdin_fd=0,
                prestart_ipython=options.prestart_ipython or start.prestart_ipython,
                on_ready=_say_ready,
            )
        )
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"sandbox_daemon: {exc}\n")
        return USAGE_ERROR
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox_daemon",
        description="Serves bash, IPython and files to one connection on a Unix socket, and ends with it. The first "
        'line of standard input is JSON: {"token": ..., "env": {...}, "cwd": ...}. Prints READY when it listens.',
    )
    parser.add_argument(
        "--socket",
        default="",
        metavar="PATH",
        help="where to listen; in a directory of mode 0700. Without it the start line names an inherited socket",
    )
    parser.add_argument("--accept-timeout-s", type=float, default=30.0, metavar="S", help="end if nobody connects")
    parser.add_argument("--prestart-ipython", action="store_true", help="do not wait for the first cell")
    parser.add_argument("--guard", action="store_true", help="for where no PID namespace ends what a killed one leaves")
    return parser.parse_args()


def _say_ready() -> None:
    sys.stdout.write("READY\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
