"""Install the peers that benchmarks measure for comparison.

python -m perf.peers setup [PEER ...]     all peers by default; installed peers are skipped python -m perf.peers status
"""

from __future__ import annotations

import argparse
import sys
import time

from perf.peers.environments import PEERS, PeerUnavailable, install, peer_python


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 if a peer is unavailable."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("setup", "status"))
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of: {', '.join(PEERS)}")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    exit_code = 0
    for name in arguments.peers or PEERS:
        peer = PEERS[name]
        started = time.monotonic()
        try:
            if arguments.command == "setup":
                print(f"{name}: {peer.title} ...", flush=True)
                install(peer)
            peer_python(peer)
        except PeerUnavailable as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            exit_code = 1
        else:
            print(f"{name}: ready in {peer.folder()} ({time.monotonic() - started:.0f} s)")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
