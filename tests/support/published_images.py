"""Images that stand for published ones of SWE-bench, out of an environment and a repository; and policies for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from prorl_launch.mining.environments import ENVIRONMENT_DIR
from prorl_trio.sandbox.images.compose import compose_image
from prorl_trio.sandbox.images.layers import store_layer
from support.code_policy import SolvesByPatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SITE = f"{ENVIRONMENT_DIR}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
NOTHING = """\
diff --git a/NOTHING.md b/NOTHING.md
new file mode 100644
--- /dev/null
+++ b/NOTHING.md
@@ -0,0 +1 @@
+It was not solved.
"""


class GoesOn(SolvesByPatch):
    """Goes on where a long turn was cut into several completions."""

    def __call__(self, prompt: str) -> str:
        """Return what is left to say of the turn."""
        before, mark, said = prompt.rpartition("<|im_start|>assistant\n")
        return super().__call__(before + mark).removeprefix(said)


def store(folder: Path, files: Mapping[str, str], at: str) -> str:
    """Store a layer of these files; `-> PLACE` becomes a link."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        else:
            path.write_text(content)
    return store_layer(folder, at=at).record.digest


def compose_testbed(
    name: str, scratch: Path, environment: str, repository: str, paths: Iterable[str], more: Iterable[str] = ()
) -> str:
    """Compose an image with what `conda activate testbed` and an editable installation are in the published ones."""
    conda = store(scratch / f"{name}-conda", {"testbed": f"-> {ENVIRONMENT_DIR}"}, "/opt/miniconda3/envs")
    editable = store(scratch / f"{name}-editable", {"testbed.pth": "".join(f"{path}\n" for path in paths)}, SITE)
    compose_image(name, "host", [environment, repository, conda, editable, *more])
    return name
