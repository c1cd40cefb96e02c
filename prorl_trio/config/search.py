"""Search for agents: the backend, and what a rollout may ask of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

from prorl_trio.config.quantities import Count, MessageBytes, Processes, Seconds
from prorl_trio.config.table import Table
from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_KEY_BYTES: Final = 64 * 1024

SearchBackendName = Literal["none", "bm25", "retrieve", "tavily"]


class SearchConfig(Table, frozen=True):
    """Search on the node, for the tool `search`: a sandbox has no part in it. See docs/search.md.

    Attributes:
        backend: what answers: `bm25` searches `corpus` in this process, `retrieve` asks an endpoint like Search-R1's,
            `tavily` asks Tavily. `none`: agents of this node cannot search.
        corpus: for `bm25`: the JSONL file of the documents.
        index_dir: for `bm25`: the folder of indexes, each of which is made once for a corpus of that content. Empty:
            `search` in the cache folder (`PRORL_CACHE_DIR`).
        index_timeout_s: for `bm25`: time for an index to be made when the node starts.
        max_line_bytes: for `bm25`: size of one line of `corpus`.
        url: for `retrieve`: the endpoint with its path; for `tavily`: in place of Tavily's own.
        api_key_file: the file with the key of the endpoint, which only its owner should read.
        api_key_env: the variable of the environment with that key, in place of a file.
        max_calls_per_rollout: searches that a rollout may make; a further one is refused, and the agent told so.
        max_results: results of one search.
        max_result_chars: text of one result; a longer one is cut at its end.
        max_query_chars: a longer query is refused, and the agent told so.
        attempt_timeout_s: time for one attempt at a search.
        search_timeout_s: time for all attempts at a search, with the waits between them.
        max_attempts: attempts at a search that fails in a way that may pass.
        max_concurrent_searches: searches at work at the same time.
        max_waiting_searches: searches that may wait for their turn; with one more the backend counts as failing.
        max_response_bytes: size of an endpoint's answer.
        probe_query: what is asked to tell a backend that fails from a query that it fails at.
    """

    backend: SearchBackendName = "none"
    corpus: str = ""
    index_dir: str = ""
    index_timeout_s: Seconds = 3600.0
    max_line_bytes: MessageBytes = 16 * 1024 * 1024
    url: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    max_calls_per_rollout: Count = 20
    max_results: Count = 5
    max_result_chars: Count = 1_500
    max_query_chars: Count = 1_000
    attempt_timeout_s: Seconds = 15.0
    search_timeout_s: Seconds = 60.0
    max_attempts: Count = 4
    max_concurrent_searches: Processes = 16
    max_waiting_searches: Count = 1_000
    max_response_bytes: MessageBytes = 8 * 1024 * 1024
    probe_query: str = "water"

    def __post_init__(self) -> None:
        if self.backend == "bm25" and not self.corpus:
            raise ValueError("corpus: the backend bm25 needs a JSONL file of documents")
        if self.backend == "retrieve" and not self.url:
            raise ValueError("url: the backend retrieve needs the URL of its endpoint")
        if self.api_key_file and self.api_key_env:
            raise ValueError("give api_key_file or api_key_env, not both")
        if self.backend == "tavily" and not (self.api_key_file or self.api_key_env):
            raise ValueError("the backend tavily needs api_key_file or api_key_env")

    def read_api_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the endpoint's key, empty if none is configured. Blocks on the disk.

        Raises:
            ConfigError: the file or the variable is not there, or has no key. The message does not have what it has.
        """
        if self.api_key_env:
            key, where = environ.get(self.api_key_env, "").strip(), f"search.api_key_env: ${self.api_key_env}"
        elif self.api_key_file:
            where = f"search.api_key_file: {self.api_key_file}"
            try:
                key = read_regular(self.api_key_file, MAX_KEY_BYTES).decode().strip()
            except OSError as exc:
                raise ConfigError(f"{where} cannot be read: {exc.strerror}") from exc
            except UnicodeDecodeError:
                raise ConfigError(f"{where} is no text") from None
        else:
            return ""
        if not key:
            raise ConfigError(f"{where} is empty: put the key there")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{where} holds no key: a key is one line of printable ASCII without spaces")
        return key
