"""BM25 over the operator's corpus, in the node's process: the index is mapped, the texts stay in the corpus' file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import numpy as np
import trio

from prorl_trio.search.backend import Document, SearchBackend, SearchFailed
from prorl_trio.search.corpus import read_line
from prorl_trio.search.index import OFFSETS, IndexFacts, IndexReply
from prorl_trio.search.words import words_of
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl_trio.config import SearchConfig

logger = logging.getLogger(__name__)

MAX_THREADS: Final = 4
"""Searches that compute at once: each takes 8 bytes of memory a document of the corpus."""


class Bm25Backend(SearchBackend):
    """An index and its corpus. Use `open_bm25`.

    A search computes in a thread, for about a millisecond per million words of the corpus that match; it is not cut by
    its time-out, and a cancel waits for it.
    """

    name = "bm25"
    max_query_chars: ClassVar[int] = 100_000

    def __init__(self, corpus: Path, retriever: Any, places: NDArray[np.int64], facts: IndexFacts) -> None:
        """Open the corpus. Blocks on the disk. Raises OSError."""
        self._corpus = corpus
        self._retriever = retriever
        self._places = places
        self._facts = facts
        self._file = os.open(corpus, os.O_RDONLY | os.O_CLOEXEC)
        self._identity = _identity(self._file)
        self._limiter = trio.CapacityLimiter(MAX_THREADS)

    async def search(self, query: str, *, max_results: int, timeout_s: float) -> list[Document]:
        """See `SearchBackend.search`; documents without a word of the query are not found."""
        del timeout_s
        return await run_sync(self._search, words_of(query), max_results, limiter=self._limiter)

    async def aclose(self) -> None:
        """Close the corpus."""
        await trio.lowlevel.checkpoint()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def statistics(self) -> dict[str, Any]:
        """Return the facts of the index."""
        return msgspec.structs.asdict(self._facts)

    def _search(self, words: list[str], max_results: int) -> list[Document]:
        if self._file < 0:
            raise SearchFailed("the search index is closed", retryable=False)
        ids = self._retriever.get_tokens_ids(words)
        if not ids:
            return []
        scores: NDArray[np.float32] = self._retriever.get_scores_from_ids(ids)
        return [self._document(place, float(scores[place])) for place in _best(scores, max_results)]

    def _document(self, place: int, score: float) -> Document:
        offset, size = map(int, self._places[place])
        try:
            line = os.pread(self._file, size, offset)
            if _identity(self._file) != self._identity:
                raise ValueError("it was written to")
            found = read_line(line, place + 1)
        except (OSError, ValueError) as exc:
            raise SearchFailed(
                f"the corpus {self._corpus} is not what was indexed ({exc}): restart the node", retryable=False
            ) from exc
        return msgspec.structs.replace(found, score=score)


def _best(scores: NDArray[np.float32], count: int) -> list[int]:
    """The places of the highest scores above 0, best first; of equal ones the earlier document."""
    count = min(count, len(scores))
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        places = np.flatnonzero(scores >= max(least, np.finfo(np.float32).tiny))
    else:
        places = np.flatnonzero(scores > 0)
    return [int(place) for place in places[np.argsort(-scores[places], kind="stable")][:count]]


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


async def open_bm25(config: SearchConfig, index_dir: Path) -> Bm25Backend:
    """Have the index of `config.corpus` made, in a process of its own, or find it; map it, and open the corpus.

    A cancel ends the process.

    Raises:
        ConfigError: the corpus cannot be used (its lines are named), or the package bm25s is missing.
    """
    corpus = Path(config.corpus)
    command = [sys.executable, "-m", "prorl_trio.search.index", str(corpus), str(index_dir), str(config.max_line_bytes)]
    with trio.move_on_after(config.index_timeout_s):
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        return await run_sync(_open, corpus, done.returncode, done.stdout, done.stderr)
    raise ConfigError(
        f"search.corpus: the index of {corpus} was not made within {config.index_timeout_s:g} s "
        "(search.index_timeout_s): allow more"
    )


def _open(corpus: Path, code: int, answer: bytes, log: bytes) -> Bm25Backend:
    try:
        reply = msgspec.json.decode(answer, type=IndexReply)
    except msgspec.DecodeError:
        said = log.decode(errors="replace")[-2000:]
        raise ConfigError(
            f"search.corpus: the process that makes the index of {corpus} ended with status {code}; "
            f"-9 is the sign of too little memory: {said}"
        ) from None
    if reply.facts is None:
        raise ConfigError(reply.error)
    import bm25s  # here, since the package is an extra

    facts, folder = reply.facts, Path(reply.folder)
    try:
        retriever = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        backend = Bm25Backend(corpus, retriever, np.load(folder / OFFSETS, mmap_mode="r"), facts)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"search: the index {folder} cannot be read: {exc}; remove that folder") from exc
    logger.info(
        "search: %d documents, %d words; the index is %d bytes on the disk (%s)%s",
        facts.documents,
        facts.words,
        facts.index_bytes,
        folder,
        f", made in {facts.seconds:g} s with {facts.peak_bytes} bytes of memory" if reply.made else "",
    )
    return backend
