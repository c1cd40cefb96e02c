"""Access to source archives in pip's configured package index. Blocks on the network."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from prorl_launch.pip_config import ask, pip_settings
from prorl_launch.progress import SetupError
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_ARCHIVE_BYTES: Final = 32 * 1024 * 1024
MAX_PAGE_BYTES: Final = 64 * 1024 * 1024
TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 3
_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_ENDINGS: Final = (".tar.gz", ".zip")
_FINAL: Final = re.compile(r"\d+(\.\d+)*(\.post\d+)?")
_ASK_PIP: Final = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


class IndexSettings(NamedTuple):
    """The addresses of the indexes, in pip's order, and the certificate file; empty for the system's."""

    urls: tuple[str, ...]
    certificates: str = ""


class IndexFile(NamedTuple):
    """A source archive in an index. `sha256` is empty if the index does not provide it."""

    name: str
    version: str
    url: str
    sha256: str

    @property
    def release(self) -> tuple[int, ...]:
        """Return the numbers of its version for sorting. `.post1` adds a number."""
        numbers = [int(number) for number in re.findall(r"\d+", self.version.partition(".post")[0])]
        while numbers and numbers[-1] == 0:
            numbers.pop()
        post = self.version.partition(".post")[2]
        return (*numbers, -1, int(post)) if post else tuple(numbers)


def normal_name(name: str) -> str:
    """Return the normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def index_settings() -> IndexSettings:
    """Return pip's configured indexes, from its files and variables.

    Raises:
        ConfigError: pip is missing for this Python.
    """
    try:
        found = pip_settings()
        main = found.get("index-url") or ask([sys.executable, "-c", _ASK_PIP]).strip()
    except SetupError as exc:
        raise ConfigError(f"mining asks the index that pip is set to: {exc}") from None
    return IndexSettings((main, *found.get("extra-index-url", "").split()), found.get("cert", ""))


def list_sdists(package: str, settings: IndexSettings) -> list[IndexFile]:
    """Return a package's source archives of final releases, oldest first, from the first index that has any.

    Raises:
        ConfigError: no index has one; with the error of each index.
    """
    said = []
    for index in settings.urls:
        url = f"{index.rstrip('/')}/{normal_name(package)}/"
        try:
            content, kind = _get(url, settings, MAX_PAGE_BYTES)
        except OSError as exc:
            said.append(f"{_shown(url)}: {exc}")
            continue
        if found := read_page(package, content, kind, url):
            return found
        said.append(f"{_shown(url)}: no source archive of a final release")
    raise ConfigError(f"{package}: {'; '.join(said)}")


def read_page(package: str, content: bytes, kind: str, url: str) -> list[IndexFile]:
    """Return the source archives on a page of the simple API, oldest release first; `kind` is its media type.

    Of several archives for a release, the first is used. Yanked files are skipped.
    """
    links: Iterable[tuple[str, str, str]]
    if "json" in kind:
        files: list[dict[str, Any]] = json.loads(content)["files"]
        links = [
            (each["filename"], each["url"], each.get("hashes", {}).get("sha256", ""))
            for each in files
            if not each.get("yanked")
        ]
    else:
        page = _Page()
        page.feed(content.decode(errors="replace"))
        links = page.links
    found: dict[str, IndexFile] = {}
    for file, link, sha256 in links:
        version = _version(package, file)
        if version and version not in found:
            found[version] = IndexFile(file, version, urljoin(url, link), sha256)
    return sorted(found.values(), key=lambda each: each.release)


def _version(package: str, file: str) -> str:
    """Return the version in a source archive's file name; empty if it is not a final release of the package."""
    stem = next((file.removesuffix(ending) for ending in _ENDINGS if file.endswith(ending)), "")
    name, _, version = stem.rpartition("-")
    return version if normal_name(name) == normal_name(package) and _FINAL.fullmatch(version) else ""


class _Page(HTMLParser):
    """A page of links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and (link := found.get("href")) and "data-yanked" not in found:
            address, _, fragment = link.partition("#")
            sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
            self.links.append((unquote(urlsplit(address).path.rpartition("/")[2]), address, sha256))


def download(file: IndexFile, folder: Path, settings: IndexSettings) -> tuple[Path, str]:
    """Download a source archive into a folder. Return its path and SHA-256. An existing file is only checked.

    Raises:
        ConfigError: it cannot be downloaded, is longer than 32 MiB, or does not match the index's hash.
    """
    target = folder / file.name
    if not target.is_file():
        try:
            content, _ = _get(file.url, settings, MAX_ARCHIVE_BYTES)
        except OSError as exc:
            raise ConfigError(f"{file.name}: {_shown(file.url)}: {exc}") from exc
        folder.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        part.write_bytes(content)
        part.replace(target)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if file.sha256 and found != file.sha256:
        target.unlink()
        raise ConfigError(f"{file.name}: its SHA-256 is {found}, and the index says {file.sha256}; it was removed")
    return target, found


def _get(url: str, settings: IndexSettings, max_bytes: int) -> tuple[bytes, str]:
    """Return the content at an address, and its media type. Raises OSError."""
    context = ssl.create_default_context(cafile=settings.certificates or None)
    request = urllib.request.Request(url, headers={"Accept": _ACCEPT, "User-Agent": "prorl-trio"})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as reply:
                content = reply.read(max_bytes + 1)
                if len(content) > max_bytes:
                    raise OSError(f"it is longer than {max_bytes} bytes")
                return content, reply.headers.get("Content-Type", "")
        except urllib.error.HTTPError as exc:
            if (exc.code < 500 and exc.code != 429) or attempt == ATTEMPTS:
                raise
        except urllib.error.URLError:
            if attempt == ATTEMPTS:
                raise
        time.sleep(attempt)  # seconds of back-off, in a thread or a command of its own
    raise AssertionError("the last attempt returns or raises")


def _shown(url: str) -> str:
    """Return an address without its credentials."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
