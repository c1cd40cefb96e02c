"""Drives one peer from inside its own environment: `python worker.py PEER`. Standard library and the peer only.

The protocol is a line of JSON in each direction: first `{"ready": true}`. For each `{"command": ...}` the answer is
`{"output", "exit_code", "elapsed_s"}`. `elapsed_s` is the time of the peer's own call, without this pipe and JSON. It
ends at the end of its input. An unexpected exception of the peer ends it, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Answer = tuple[str, int | None]
    Run = Callable[[str], Answer]

COMMAND_TIMEOUT_S = 30


@contextmanager
def open_tmux() -> Iterator[Run]:
    """Open OpenHands' terminal tool as its agent calls it: without a timeout, in a pane of its pool."""
    implementation: Any = importlib.import_module("openhands.tools.terminal.impl")
    action: Any = importlib.import_module("openhands.tools.terminal.definition").TerminalAction
    executor = implementation.TerminalExecutor(working_dir=os.getcwd(), terminal_type="tmux")

    def run(command: str) -> Answer:
        observation = executor(action(command=command))
        return observation.text, observation.exit_code

    try:
        yield run
    finally:
        executor.close()


@contextmanager
def open_swerex() -> Iterator[Run]:
    """Open SWE-ReX's runtime in this process, without its usual HTTP server."""
    abstract: Any = importlib.import_module("swerex.runtime.abstract")
    refusal: Any = importlib.import_module("swerex.exceptions").SwerexException
    runtime = importlib.import_module("swerex.runtime.local").LocalRuntime()
    with asyncio.Runner() as runner:
        runner.run(runtime.create_session(abstract.CreateBashSessionRequest()))

        def run(command: str) -> Answer:
            action = abstract.BashAction(command=command, check="silent", timeout=COMMAND_TIMEOUT_S)
            try:
                observation = runner.run(runtime.run_in_session(action))
            except refusal as exc:
                return f"{type(exc).__name__}: {exc}", None
            return observation.output, observation.exit_code

        try:
            yield run
        finally:
            runner.run(runtime.close())


@contextmanager
def open_jupyter() -> Iterator[Run]:
    """Use ipykernel through jupyter_client's blocking client: a command is `tcp CODE` or `ipc CODE`.

    `execute_interactive` returns when the answer and all output have arrived, as a tool needs them.
    """
    manager_type: Any = importlib.import_module("jupyter_client.manager").KernelManager
    clients: dict[str, Any] = {}
    managers: list[Any] = []
    try:
        for transport in ("tcp", "ipc"):
            options = {"ip": os.path.abspath("kernel-ipc")} if transport == "ipc" else {}
            manager = manager_type(transport=transport, **options)
            manager.start_kernel()
            managers.append(manager)
            clients[transport] = manager.client()
            clients[transport].start_channels()
            clients[transport].wait_for_ready(timeout=COMMAND_TIMEOUT_S)

        def run(command: str) -> Answer:
            transport, _, code = command.partition(" ")
            said: list[str] = []
            reply = clients[transport].execute_interactive(
                code,
                store_history=False,
                timeout=COMMAND_TIMEOUT_S,
                output_hook=lambda message: said.append(str(message)),
            )
            return "".join(said), 0 if reply["content"]["status"] == "ok" else 1

        yield run
    finally:
        for client in clients.values():
            client.stop_channels()
        for manager in managers:
            manager.shutdown_kernel(now=True)


@contextmanager
def open_renderers() -> Iterator[Run]:
    """Open `renderers` for Qwen3 and transformers' chat template, over one dialogue at a time.

    `begin PATH` loads a JSON file with `model_dir`, `messages`, `said`, `completion_ids`, `new_messages` and `tools`.
    `renderers` parses the completion and extends the prompt. `transformers` renders and encodes all messages. Both
    answer with their CPU seconds, which other programs do not affect. `digest` returns the digest of the last ids.
    """
    fast_type: Any = importlib.import_module("transformers").PreTrainedTokenizerFast
    peer: Any = importlib.import_module("renderers")
    loaded: dict[str, tuple[Any, Any]] = {}
    dialogue: dict[str, Any] = {}

    def begin(path: str) -> None:
        with open(path, encoding="utf-8") as file:
            dialogue.update(json.load(file))
        folder = dialogue["model_dir"]
        if folder not in loaded:
            tokenizer = fast_type.from_pretrained(folder)
            loaded[folder] = tokenizer, peer.create_renderer(tokenizer, peer.Qwen3RendererConfig())
        renderer, tools = loaded[folder][1], dialogue["tools"]
        dialogue["prompt_ids"] = renderer.render_ids(dialogue["messages"], tools=tools, add_generation_prompt=True)

    def run(command: str) -> Answer:
        action, _, path = command.partition(" ")
        if action == "begin":
            begin(path)
        tokenizer, renderer = loaded[dialogue["model_dir"]]
        prompt, completion, tools = dialogue["prompt_ids"], dialogue["completion_ids"], dialogue["tools"]
        started_s = time.thread_time()
        if action == "renderers":
            renderer.parse_response(completion, tools=tools, prompt_ids=prompt)
            extended = renderer.bridge_to_next_turn(prompt, completion, dialogue["new_messages"], tools=tools)
            dialogue["made"] = [] if extended is None else extended.token_ids
        elif action == "transformers":
            messages = [
                *dialogue["messages"],
                {"role": "assistant", "content": dialogue["said"]},
                *dialogue["new_messages"],
            ]
            options = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
            dialogue["made"] = tokenizer.apply_chat_template(messages, **options)
        elif action == "digest":
            return hashlib.sha256(json.dumps(dialogue["made"]).encode()).hexdigest(), 0
        return str(time.thread_time() - started_s), 0

    yield run


OPENERS = {"tmux": open_tmux, "swerex": open_swerex, "jupyter": open_jupyter, "renderers": open_renderers}


def serve(opener: Callable[[], AbstractContextManager[Run]]) -> None:
    """Answer until the input ends. Output of peers and their children goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        with opener() as run:
            print(json.dumps({"ready": True}), file=answers, flush=True)
            for line in sys.stdin:
                command = json.loads(line)["command"]
                started = time.perf_counter()
                output, exit_code = run(command)
                elapsed_s = time.perf_counter() - started
                answer = {"output": output, "exit_code": exit_code, "elapsed_s": elapsed_s}
                print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(OPENERS[sys.argv[1]])
