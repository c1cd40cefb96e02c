"""The viewer's static files as endpoints. They hold no secret, and the page can load nothing but them."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, Literal

import trio

from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest.call import Endpoint
from prorl_trio.edges.rest.schema import NoQuery

if TYPE_CHECKING:
    from prorl_trio.edges.rest.call import Call

Source = Literal["node", "runs", "follow"]
"""What the page shows: a live node, recorded runs, or recorded runs that may still grow."""

PAGE: Final = "index.html"
STYLE: Final = "style.css"
MODULES: Final = ("dom.js", "source.js", "charts.js", "tokens.js", "rollout.js", "runs.js", "live.js", "main.js")
"""In the order of their imports: each imports only from those before it."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_IMPORT: Final = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:const|function) (\w+))", re.MULTILINE)


def viewer_endpoints(source: Source) -> list[Endpoint]:
    """Return the endpoints of the page `/ui`; where recorded runs are shown, it is at `/` as well."""
    page = _read(PAGE).replace('data-source="node"', f'data-source="{source}"')
    pages = [_endpoint(path, page, PAGE) for path in (("/ui",) if source == "node" else ("/ui", "/"))]
    return pages + [_endpoint(f"/ui/{name}", _read(name), name) for name in (STYLE, *MODULES)]


def one_file(data: bytes) -> bytes:
    """Return a page that shows `data`, JSON, without a server and from a disk."""
    script = "".join(_scope(name.removesuffix(".js"), _read(name)) for name in MODULES)
    style = _read(STYLE)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    before, _, body = re.split(r"(<head>.*</head>)", _read(PAGE).replace("</html>", ""), flags=re.DOTALL)
    head = (
        f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>prorl-trio</title><style>{style}</style></head>'
    )
    before = before.replace('data-source="node"', 'data-source="file"')
    embedded = data.replace(b"<", b"\\u003c")
    end = f'<script type="module">{script}</script></html>'.encode()
    return f'{before}{head}{body}<script type="application/json" id="data">'.encode() + embedded + b"</script>" + end


def _scope(name: str, module: str) -> str:
    """Return a module as a function that is called at once and returns what it exports, for a script of them all."""
    exported = ", ".join(found[1] for found in _EXPORT.findall(module))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", module))
    start = "const modules = {};\n" if name == MODULES[0].removesuffix(".js") else ""
    return f"{start}modules.{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@lru_cache
def _read(name: str) -> str:
    return (files("prorl_trio.edges.viewer") / "static" / name).read_text(encoding="utf-8")


def _endpoint(path: str, content: str, name: str) -> Endpoint:
    media_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"

    async def viewer(_call: Call) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(content.encode(), headers=HEADERS, media_type=media_type)

    return Endpoint(
        method="GET",
        path=path,
        handler=viewer,
        summary="A page that shows the live state, with the token that is typed there.",
        query=NoQuery,
        replies={200: None},
        media_type=media_type.partition(";")[0],
        free=True,
        is_part_of_page=path != "/ui",
    )
