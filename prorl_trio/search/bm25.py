"""BM25 over the operator's corpus, in the node's process. The index is memory-mapped; the texts stay in their file."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import numpy as np
import trio

from prorl_trio.file_systems import open_regular
from prorl_trio.search.backend import Document, SearchBackend, SearchFailed
from prorl_trio.search.corpus import read_corpus, read_line
from prorl_trio.search.words import WORDS_VERSION, words_of
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl_trio.config import SearchConfig

FORMAT_VERSION: Final = 1
FACTS: Final = "facts.json"
OFFSETS: Final = "offsets.npy"
"""Shape [documents, 2], int64: offset and size of each document's line in the corpus, in bytes."""
_CHUNK_BYTES: Final = 4 * 1024 * 1024


class IndexFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an index. `corpus_bytes` is the size of its corpus."""

    documents: int
    words: int
    corpus_bytes: int
    index_bytes: int
    seconds: float
    peak_bytes: int


class IndexReply(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the index and its facts, or the reason why it is missing. `made`: this call created the index."""

    folder: str = ""
    facts: IndexFacts | None = None
    made: bool = False
    error: str = ""


def make_index(corpus: Path, folder: Path, max_line_bytes: int) -> IndexReply:
    """Return the index of `corpus` below `folder`; create the index if it does not exist.

    Its name is a hash of the corpus' content, the version of bm25s and our own formats. The index is complete or
    absent: it is created elsewhere and renamed, so processes may create the same index concurrently. Blocks until it is
    done.

    Raises:
        ConfigError: the corpus cannot be used, bm25s is not installed, or the folder cannot be written.
    """
    try:
        target = folder / _key(corpus)
        if (target / FACTS).exists():
            facts = msgspec.json.decode((target / FACTS).read_bytes(), type=IndexFacts)
            return IndexReply(folder=str(target), facts=facts)
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            facts = _write(corpus, beside, max_line_bytes)
            _put_in_place(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as exc:
        raise ConfigError(f"search: no index of {corpus} below {folder}: {exc.strerror}: {exc.filename}") from exc
    return IndexReply(folder=str(target), facts=facts, made=True)


def _put_in_place(beside: Path, target: Path) -> None:
    try:
        beside.rename(target)
    except OSError:
        if not (target / FACTS).exists():  # otherwise another process was faster
            raise


def _key(corpus: Path) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION} {WORDS_VERSION} {version('bm25s')}\n".encode())
    with os.fdopen(open_regular(corpus), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:32]


def _write(corpus: Path, folder: Path, max_line_bytes: int) -> IndexFacts:
    import bm25s  # imported late, because the package is an extra

    started_s = time.monotonic()
    size = corpus.stat().st_size
    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    places: list[tuple[int, int]] = []
    for line in read_corpus(corpus, max_line_bytes):
        text = words_of(f"{line.document.title} {line.document.text}")
        # `setdefault` gives equal words the same number object, so a word of the corpus takes 8 bytes
        ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in text])
        places.append((line.offset, line.size))
    if not vocabulary:
        raise ConfigError(f"search.corpus: {corpus} has no words that can be searched for")
    words = len(vocabulary)  # bm25s adds an empty one
    retriever: Any = bm25s.BM25(method="lucene", csc_backend="numpy")
    retriever.index((ids, vocabulary), show_progress=False)
    retriever.save(str(folder), show_progress=False)
    np.save(folder / OFFSETS, np.asarray(places, dtype=np.int64))
    facts = IndexFacts(
        documents=len(places),
        words=words,
        corpus_bytes=size,
        index_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        seconds=round(time.monotonic() - started_s, 3),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    (folder / FACTS).write_bytes(msgspec.json.encode(facts))
    return facts


def main() -> None:
    """Write an `IndexReply` to standard output."""
    corpus, folder, max_line_bytes = sys.argv[1:]
    stdout = os.dup(1)
    os.dup2(2, 1)  # so that output of libraries does not mix with the reply
    try:
        reply = make_index(Path(corpus), Path(folder), int(max_line_bytes))
    except ConfigError as exc:
        reply = IndexReply(error=str(exc))
    except ModuleNotFoundError as exc:
        reply = IndexReply(error=f"search.backend bm25 needs {exc.name}: pip install 'prorl-trio[stem]'")
    with os.fdopen(stdout, "wb") as out:
        out.write(msgspec.json.encode(reply))


if __name__ == "__main__":
    main()


logger = logging.getLogger(__name__)

MAX_THREADS: Final = 4
"""Number of concurrent searches. Each needs 8 bytes of memory per document of the corpus."""


class Bm25Backend(SearchBackend):
    """A backend with an index and its corpus. Create it with `open_bm25`.

    A search computes in a thread, for about a millisecond per million words of the corpus that match. Its time-out does
    not interrupt it, and a cancel waits for it.
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
        """See `SearchBackend.search`. Documents without a word of the query are not returned."""
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
    """Return the indices of the highest scores above 0, best first. Of equal scores, the earlier document wins."""
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
    """Find the index of `config.corpus`, or create it in a separate process; map it and open the corpus.

    A cancel kills the process.

    Raises:
        ConfigError: the corpus cannot be used (the message names its bad lines), or the package bm25s is missing.
    """
    corpus = Path(config.corpus)
    command = [sys.executable, "-m", "prorl_trio.search.bm25", str(corpus), str(index_dir), str(config.max_line_bytes)]
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
    import bm25s  # imported late, because the package is an extra

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
