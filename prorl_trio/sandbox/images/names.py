"""References of images in registries: their parts, and the naming rules of task suites."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DOCKER: Final = "docker://"
_DOCKER_HUB: Final = "docker.io"
_DOCKER_HUB_API: Final = "registry-1.docker.io"

_REPOSITORY: Final = re.compile(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class Reference(NamedTuple):
    """The parts of `docker://HOST/REPOSITORY:TAG@DIGEST`.

    Attributes:
        host: host of the registry, with its port if named; default `docker.io`.
        repository: without the host.
        tag: `latest` if neither tag nor digest is named.
        digest: digest of the manifest; empty if not named. It takes precedence over the tag.
    """

    host: str
    repository: str
    tag: str
    digest: str

    @property
    def api_host(self) -> str:
        return _DOCKER_HUB_API if self.host == _DOCKER_HUB else self.host

    @property
    def version(self) -> str:
        """Return the identifier for requesting a manifest: the digest, else the tag."""
        return self.digest or self.tag


def parse_reference(reference: str) -> Reference:
    """Return the parts of a reference as Docker reads it.

    Raises:
        ValueError: it is not a valid reference.
    """
    rest = reference.removeprefix(DOCKER)
    rest, _, digest = rest.partition("@")
    first, slash, others = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, rest = first, others
    else:
        host = _DOCKER_HUB
    name, colon, tag = rest.rpartition(":")
    if not colon:
        name, tag = rest, "" if digest else "latest"
    if host == _DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    if (
        not _REPOSITORY.fullmatch(name)
        or ((tag or colon) and not _TAG.fullmatch(tag))
        or (digest and not _DIGEST.fullmatch(digest))
    ):
        raise ValueError(f"{reference!r} is no reference of an image: docker://[HOST[:PORT]/]NAME[:TAG][@sha256:...]")
    return Reference(host, name, tag, digest)


def swe_bench_image(instance_id: str) -> str:
    """Return the image in which SWE-bench's harness evaluates an instance: `astropy__astropy-12907`."""
    return f"{DOCKER}swebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def swe_gym_image(instance_id: str) -> str:
    """Return the image in which SWE-Gym's environments run an instance."""
    return f"{DOCKER}xingyaoww/sweb.eval.x86_64.{instance_id.lower().replace('__', '_s_')}:latest"


def swe_smith_image(instance_id: str) -> str:
    """Return the image of all instances of a repository in SWE-smith, whose ids are `OWNER__REPO.COMMIT.BUG`."""
    repository = instance_id.rpartition(".")[0].lower().replace("__", "_1776_")
    return f"{DOCKER}swebench/swesmith.x86_64.{repository}:latest"


SUITES: Final[Mapping[str, Callable[[str], str]]] = {
    "swe-bench": swe_bench_image,
    "swe-gym": swe_gym_image,
    "swe-smith": swe_smith_image,
}
"""The rule from an instance's id to its reference, by the name of the suite."""
