"""Sandbox providers: each starts an isolated process tree with a daemon inside, and ends it."""

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
            path of an unpacked root directory or of a `.sif` file, or an image stored by `prorl-trio image`: the
            reference it was pulled by, or the name it was built as. Such an image needs no Python and no bash; its
            tools use its own libraries, PATH and variables. bubblewrap takes directories only (`prorl-trio image
            unpack`).
        layers: folders laid over the image, lowest first; higher ones hide lower ones. Each is `sha256:` and the digest
            of a stored layer (`images.layers.store_layer`, `prorl-trio image layer`), or the absolute path of a folder,
            which must not change. Nothing is copied; data written over it is discarded. Over `host` they must not
            contain a folder of its userland (/usr, /bin, ...), nor anything in /tmp or the home directory.
        network: False gives an empty network namespace with only loopback.
        env: variables for the tools. Nothing of the node's environment is passed on.
        start_timeout_s: time limit from the start of the process to the daemon's handshake.
        limits: resource limits of the tools.
        prestart_bash: start the shell with the sandbox, not with its first command. It costs a dozen milliseconds of
            CPU, which is wasted if the agent never uses a shell.
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

    `problem` names the missing part, and is empty when `usable`. `images_problem` describes why only sandboxes of
    `host` work, without other images or layers; it is empty if all work. `remedy` is a remedy for either.
    """

    name: str
    usable: bool
    version: str = ""
    problem: str = ""
    images_problem: str = ""
    remedy: str = ""


class SandboxProvider(abc.ABC):
    """Starts sandboxes of one kind. Stateless except for its configuration; may be shared by all tasks."""

    name: ClassVar[str]
    isolated: ClassVar[bool]
    """If False, it runs code as the node itself: only for tests, and a node logs a warning when it starts with it."""
    has_fakeroot: ClassVar[bool] = False
    """Whether tools may be root inside, as `sandbox.fakeroot` asks for."""
    has_layers: ClassVar[bool] = False
    """Whether it lays the `layers` of a spec over its image, and supports images of layers. Otherwise it refuses them
    with `SandboxUnavailable`."""

    @classmethod
    def configured(cls, config: SandboxConfig) -> Self:
        """Return a provider for the node's configuration. Default: made without arguments."""
        del config
        return cls()

    @abc.abstractmethod
    async def probe(self) -> ProviderReport:
        """Start the smallest possible sandbox of this kind and report. Missing parts never make it raise."""

    def serving(self, spec: SandboxSpec) -> SandboxProvider:
        """Return the provider that starts a sandbox of `spec`, for logs: this one, unless it combines several."""
        del spec
        return self

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        """Hold the resources open that sandboxes of this provider share on this machine, to save work at each start.

        Optional for users: otherwise a sandbox opens them for itself. Default: nothing is shared.
        """
        return nullcontext()

    @abc.abstractmethod
    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox, yield it when its daemon has answered the handshake, and end it when the block exits.

        However the block exits, no process, mount, socket or folder of the sandbox remains. Clean-up is shielded and
        bounded by a few seconds; anything that survives it is logged, and ended later in the background.

        Raises:
            SandboxUnavailable: it could not be started; the message has the provider's own output and a remedy.
        """
