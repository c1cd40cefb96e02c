"""A node in a process of its own, as the commands of `launch` start it."""

from __future__ import annotations

import trio

from prorl_launch.node import open_node_process
from prorl_trio.client import connect
from prorl_trio.testing.tiny_model import make_tiny_model


async def test_the_endpoint_of_an_earlier_node_in_the_folder_is_not_taken_for_its_own(tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "endpoint.json").write_text('{"url": "ws://127.0.0.1:1"}')
    config = {"model": {"path": str(tmp_path / "model")}, "sandbox": {"provider": "process"}}
    with trio.fail_after(100):
        async with (
            open_node_process(config, folder=tmp_path, log_file=tmp_path / "node.log") as node,
            connect(node.url, node.token) as client,
        ):
            assert (await client.list_backends()).pool["backends"] == []
