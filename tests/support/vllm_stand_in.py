"""A program that stands in for vLLM's server: it takes its options, and does `BEHAVIOUR` once it listens."""

SERVER = """
import json, os, sys, trio
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
print(json.dumps({"options": options, "env": dict(os.environ)}), flush=True)
async def main():
    config = FakeEngineConfig(model=options["--model"], max_model_len=int(options["--max-model-len"]))
    async with open_fake_engine(config=config, port=int(options["--port"])) as engine:
        BEHAVIOUR
        await trio.sleep_forever()
trio.run(main)
"""
