"""The documentation site: the Markdown files of the repository, and the API from docstrings. Built by `make site`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
release = version = PROJECT["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["docs/site/*.md", "docs/*.md", "docs/trainers/*.md", "ipc/PROTOCOL.md", *(path.name for path in ROOT.glob("*.md"))]
root_doc = "docs/site/index"
html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may begin a section two levels down
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def mark_code(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Make an indented paragraph a block of code, and text in single backticks code, as our docstrings mean them."""
    shown: list[str] = []
    for line in lines:
        said = [each for each in shown if each]
        if line.startswith("    ") and shown and not shown[-1] and not said[-1].startswith(" "):
            shown += ["::", ""]
        shown.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    lines[:] = shown


def setup(app: Sphinx) -> None:
    """Add what is above to Sphinx; before napoleon, which reads the sections."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)
