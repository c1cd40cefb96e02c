"""Serves agentlightning's LLM proxy: `python lightning.py PORT ENGINE_URL`. Its package and the standard library only.

It has its defaults, except for one process instead of two, which saves a hop to its store. Each call is a span of a
rollout's attempt, kept in memory.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from typing import Any

START_TIMEOUT_S = 80.0


async def serve(port: int, engine: str) -> None:
    """Serve until the process ends. Calls need `LITELLM_MASTER_KEY` as their key."""
    proxy: Any = importlib.import_module("agentlightning.llm_proxy").LLMProxy
    store: Any = importlib.import_module("agentlightning.store").InMemoryLightningStore
    launch: Any = importlib.import_module("agentlightning.utils.server_launcher").PythonServerLauncherArgs
    where = {"model": "hosted_vllm/fake-model", "api_base": f"{engine}/v1"}
    how = launch(
        port=port,
        host="127.0.0.1",
        launch_mode="thread",
        startup_timeout=START_TIMEOUT_S,
        log_level=logging.WARNING,
    )
    models = [{"model_name": "m", "litellm_params": where}]
    await proxy(store=store(thread_safe=True), launcher_args=how, model_list=models).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the internet
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
