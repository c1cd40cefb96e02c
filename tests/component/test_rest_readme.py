"""The curl session of the trainer's guide works as it is printed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import trio

from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_rest import TOKEN, open_rest
from support.skips import because

GUIDE = Path(__file__).parents[2] / "docs" / "trainer.md"
SESSION = re.compile(r"```sh\n((?:(?!```).)*?\bcurl\b.*?)```", re.DOTALL)


async def test_curl_sessions_of_the_guide():
    sessions = SESSION.findall(GUIDE.read_text())
    assert sessions, "the guide has no curl session"
    if shutil.which("curl") is None:
        pytest.skip(because("there is no curl", "apt-get install curl"))
    node = FakeNode(lambda spec: make_outcome(spec))
    take = node.take

    def take_whatever_handler(spec, sink, attempt):
        take(make_spec(spec.job_id, group_id=spec.group_id), sink, attempt)

    node.check, node.take = (lambda _spec, _sink, _ahead: None), take_whatever_handler
    with trio.fail_after(60):
        async with open_rest(node) as rest:
            script = "set -eu\n" + "".join(sessions).replace("curl ", "curl --fail --max-time 20 ")
            env = {**os.environ, "PRORL_TOKEN": TOKEN, "PRORL_REST": rest.url}
            for _ in range(2):  # nothing of the first run is in the way of the second
                done = await trio.run_process(
                    ["bash", "-c", script], env=env, capture_stdout=True, capture_stderr=True, check=False
                )
                assert done.returncode == 0, done.stderr.decode()
                assert b'"completed"' in done.stdout
