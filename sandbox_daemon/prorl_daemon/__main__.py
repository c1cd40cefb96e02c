"""`python -m prorl_daemon --socket PATH`: see `--help`."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Run the daemon; return its exit code: 0 at the end of its connection, 2 if it was started wrongly."""
    options = _parse_options()
    if options.guard:
        from prorl_daemon.guard import stay_behind

        stay_behind()

    if options.fork_server >= 0:
        from prorl_daemon.fork_server import serve_forks

        return serve_forks(options.fork_server)

    from prorl_daemon.run import run_daemon

    return run_daemon(
        options.socket, accept_timeout_s=options.accept_timeout_s, prestart_ipython=options.prestart_ipython
    )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m prorl_daemon",
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
    parser.add_argument(
        "--fork-server", type=int, default=-1, metavar="FD", help="be no daemon, but fork one for each packet from FD"
    )
    parser.add_argument("--guard", action="store_true", help="for where no PID namespace ends what a killed one leaves")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
