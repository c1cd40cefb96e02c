"""`python -m support.learn_checks RESULTS` writes where each check failed, or nothing.

With `--model-for PROGRAM` it makes a tiny model in the folder `MODEL`, and runs the program.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from support.learn_checks import files, objectives, packs, runs, updates
from support.learn_checks.made_up import tiny_model


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "--model-for":
        tiny_model().save_pretrained(os.environ["MODEL"])
        Path(os.environ["MODEL"], "tokenizer.json").write_text("{}")
        runpy.run_path(sys.argv[2], run_name="__main__")
        return
    results = {}
    for module in (objectives, packs, updates, files, runs):
        for name, check in vars(module).items():
            if name.startswith("check_"):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        check(Path(folder))
                        results[name] = ""
                    except Exception:  # whatever a check raises is its result
                        results[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
