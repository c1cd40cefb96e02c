"""Sandbox providers: each starts an isolated process tree with a daemon in it, and ends it."""

from __future__ import annotations

import abc
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

from prorl_ipc.limits import SandboxLimits

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.sandbox import Sandbox


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a sandbox to start.

    Attributes:
        image: `host` (the host's own /usr, /bin and /lib* and the project's Python, read-only over an empty root), the
            path of an unpacked root directory or of a `.sif` file, or what `prorl-trio image` has stored: the reference
            it was pulled by, or the name it was built as. Such an image needs no Python and no bash; its tools have its
            own libraries, PATH and variables. bubblewrap takes directories only (`prorl-trio image unpack`).
        layers: what is seen over the image, lowest first, where a higher one hides what a lower one has: `sha256:` and
            the digest of a stored layer (`images.layers.store_layer`, `prorl-trio image layer`), or the absolute path
            of a folder, which must not change meanwhile. Nothing is copied; what is written over it is thrown away.
            Over `host` they may have no folder of its userland (/usr, /bin, ...), and nothing in /tmp or the home
            directory.
        network: False gives an empty network namespace with loopback only.
        env: variables for the tools. Nothing of the node's environment is passed on.
        start_timeout_s: from the start of the process to the daemon's handshake.
        limits: what the tools may use.
        prestart_bash: start the shell with the sandbox, not with its first command. It takes a dozen milliseconds of
            CPU, of which an agent without a shell has nothing.
        prestart_ipython: start the IPython shell with the sandbox, not with its first cell.
    """

    image: str = "host"
    layers: tuple[str, ...] = ()
    network: bool = False
    env: dict[str, str] = {}
    start_timeout_s: float = 30.0
    limits: SandboxLimits = SandboxLimits()
    prestart_bash: bool = True
    prestart_ipython: bool = False


class ProviderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's report on this machine, for `doctor` and the automatic choice.

    `problem` says what is missing, and is empty when `usable`. `images_problem` says why sandboxes of images other than
    `host`, and of layers, do not work although those of `host` may; it is empty if they do. `remedy` says what to do
    about either.
    """

    name: str
    usable: bool
    version: str = ""
    problem: str = ""
    images_problem: str = ""
    remedy: str = ""


class SandboxProvider(abc.ABC):
    """Starts sandboxes of one kind. Holds no state but its configuration; may be shared by all tasks."""

    name: ClassVar[str]
    isolated: ClassVar[bool]
    """False: runs code as the node itself. For tests only, and said so loudly when a node starts with it."""
    has_fakeroot: ClassVar[bool] = False
    """Tools may be root inside, as `sandbox.fakeroot` asks for."""
    has_layers: ClassVar[bool] = False
    """Lays the `layers` of a spec over its image, and takes images of layers. False: it refuses them, with
    `SandboxUnavailable`."""

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        """Return a provider as the node's configuration wants it. Default: made without arguments."""
        del config
        return cls()

    @abc.abstractmethod
    async def probe(self) -> ProviderReport:
        """Start the smallest possible sandbox of this kind and report. Never raises for a missing piece."""

    def serving(self, spec: SandboxSpec) -> SandboxProvider:
        """Return the provider that starts a sandbox of `spec`, for logs and figures: this one, unless it is several."""
        del spec
        return self

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        """Keep open what this provider's sandboxes share on this machine, so that not each start has to make it.

        Optional for users: a sandbox opens for itself what nobody holds open. Default: nothing is shared.
        """
        return nullcontext()

    @abc.abstractmethod
    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox, yield it when its daemon has answered the handshake, end it on leaving the block.

        On leaving, whether by return, error or cancellation, nothing is left: no process of its tree, no mount, no
        socket, no folder. Clean-up is shielded and bounded by a few seconds; what survives that is logged, and ended
        later, in the background.

        Raises:
            SandboxUnavailable: it could not be started, with the provider's own words and what to do.
        """
