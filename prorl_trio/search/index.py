"""An index of a corpus on the disk: made once for each content, in a process of its own, then mapped.

`python -m prorl_trio.search.index CORPUS FOLDER MAX_LINE_BYTES` makes it and prints an `IndexReply`. The process exists
because the work holds Python's lock for seconds to hours, and takes memory that is to be given back.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from prorl_trio.file_systems import open_regular
from prorl_trio.search.corpus import read_corpus
from prorl_trio.search.words import WORDS_VERSION, words_of
from prorl_trio.types.errors import ConfigError

FORMAT_VERSION: Final = 1
FACTS: Final = "facts.json"
OFFSETS: Final = "offsets.npy"
"""Shape [documents, 2], int64: offset and size of each document's line in the corpus, in bytes."""
_CHUNK_BYTES: Final = 4 * 1024 * 1024


class IndexFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an index. `corpus_bytes` is the size of the corpus that it is of."""

    documents: int
    words: int
    corpus_bytes: int
    index_bytes: int
    seconds: float
    peak_bytes: int


class IndexReply(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the index and its facts, or why there is none. `made`: now, not by an earlier call."""

    folder: str = ""
    facts: IndexFacts | None = None
    made: bool = False
    error: str = ""


def make_index(corpus: Path, folder: Path, max_line_bytes: int) -> IndexReply:
    """Return the index of `corpus` below `folder`, and make it if it is not there.

    Its name is a key of the corpus' content, of bm25s' version and of our own formats. It is whole or absent: made
    beside its place and renamed, so that processes may make the same one at once. Blocks for as long as it takes.

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
        if not (target / FACTS).exists():  # else another process was faster
            raise


def _key(corpus: Path) -> str:
    digest = hashlib.sha256(f"{FORMAT_VERSION} {WORDS_VERSION} {version('bm25s')}\n".encode())
    with os.fdopen(open_regular(corpus), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:32]


def _write(corpus: Path, folder: Path, max_line_bytes: int) -> IndexFacts:
    import bm25s  # here, since the package is an extra

    started_s = time.monotonic()
    size = corpus.stat().st_size
    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    places: list[tuple[int, int]] = []
    for line in read_corpus(corpus, max_line_bytes):
        text = words_of(f"{line.document.title} {line.document.text}")
        # `setdefault` gives equal words one number object: a word of the corpus takes 8 bytes
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
    """Answer with an `IndexReply` on standard output."""
    corpus, folder, max_line_bytes = sys.argv[1:]
    stdout = os.dup(1)
    os.dup2(2, 1)  # what others print
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
