"""Prompts of every published family against `transformers`: `PYTHONPATH=tests python -m support.chat_oracle`.

Needs `transformers`. Prints a line for each family; the exit code is 1 if any difference is unexplained.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prorl_trio.chat.format import ChatFormat
from prorl_trio.chat.proof import Unexplained, prove_dialogue
from prorl_trio.types.errors import HandlerError
from support.chat_families import ALL_CHAT_FAMILIES, write_family_model
from support.published_models import PUBLISHED_MODELS, NotAvailable, published_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prorl_trio.types.models import Message, ToolSchema

BATCH_DIALOGUES: Final = 500
MAX_DIFFERENCES: Final = 20
"""Kept of one family, to be looked at."""


class TransformersOracle:
    """`transformers`' own rendering and encoding of a model folder."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns that there is no PyTorch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import PreTrainedTokenizerFast
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self._options = options

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], open_turn: bool) -> str:
        """See `chat_proof.Oracle`."""
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=open_turn,
                    tokenize=False,
                    **self._options,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError) as exc:
            raise HandlerError(str(exc)) from exc

    def encode(self, text: str) -> list[int]:
        """See `chat_proof.Oracle`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class FamilyResult(NamedTuple):
    """What the dialogues of one family showed; see `chat_proof.Proof`. `differences` are the unexplained ones."""

    name: str
    exact: int = 0
    rewritten: int = 0
    refused: int = 0
    turns: int = 0
    differences: tuple[str, ...] = ()
    cpu_s: float = 0.0

    def total(self) -> int:
        """Return the number of dialogues."""
        return self.exact + self.rewritten + self.refused + len(self.differences)

    def plus(self, other: FamilyResult) -> FamilyResult:
        """Return both together."""
        return FamilyResult(
            self.name,
            exact=self.exact + other.exact,
            rewritten=self.rewritten + other.rewritten,
            refused=self.refused + other.refused,
            turns=self.turns + other.turns,
            differences=self.differences + other.differences,
            cpu_s=self.cpu_s + other.cpu_s,
        )


def compare_family(name: str, folder: Path, dialogues: int, seed: int, options: Mapping[str, Any]) -> FamilyResult:
    """Compare one model folder over `dialogues` that are made up from `seed`."""
    chat, oracle = ChatFormat.load(folder, template_options=options), TransformersOracle(folder, options)
    random, started_s = Random(f"{name} {seed}"), time.process_time()
    counted, turns, differences = {"exact": 0, "rewritten": 0, "refused": 0}, 0, []
    for number in range(dialogues):
        try:
            kind, rounds = prove_dialogue(chat, oracle, random)
        except Unexplained as exc:
            differences.append(f"seed {seed}, dialogue {number}: {exc}")
            if len(differences) == MAX_DIFFERENCES:
                break
        else:
            counted[kind] += 1
            turns += rounds
    cpu_s = time.process_time() - started_s
    return FamilyResult(name, **counted, turns=turns, differences=tuple(differences), cpu_s=cpu_s)


def compare_families(
    folders: Mapping[str, tuple[Path, Mapping[str, Any]]], dialogues: int, processes: int, seed: int
) -> list[FamilyResult]:
    """Compare all `folders` (with the options of their templates), in all over `dialogues`, in several processes."""
    each = -(-dialogues // len(folders))
    results = {name: FamilyResult(name) for name in folders}
    with ProcessPoolExecutor(processes) as pool:
        batches = [
            pool.submit(compare_family, name, folder, min(BATCH_DIALOGUES, each - start), seed + start, options)
            for start in range(0, each, BATCH_DIALOGUES)
            for name, (folder, options) in folders.items()
        ]
        for batch in as_completed(batches):
            result = batch.result()
            results[result.name] = results[result.name].plus(result)
            sys.stderr.write(f"{sum(map(FamilyResult.total, results.values()))} dialogues: {result}\n")
    return list(results.values())


def table(results: Sequence[FamilyResult]) -> str:
    """Return the results as text, a line each."""
    lines = [f"{'family':<22}{'exact':>8}{'rewritten':>11}{'refused':>9}{'turns':>9}{'unexplained':>13}{'cpu ms':>9}"]
    for one in results:
        lines.append(
            f"{one.name:<22}{one.exact:>8}{one.rewritten:>11}{one.refused:>9}{one.turns:>9}{len(one.differences):>13}"
            f"{one.cpu_s / max(1, one.total()) * 1e3:>9.1f}"
        )
        lines += [f"    {difference}" for difference in one.differences]
    return "\n".join(lines)


def available_folders(tiny_folder: Path) -> dict[str, tuple[Path, Mapping[str, Any]]]:
    """Return what there is: a tiny model of each family, written below `tiny_folder`, and what can be fetched."""
    folders: dict[str, tuple[Path, Mapping[str, Any]]] = {
        f"{family} (tiny)": (write_family_model(tiny_folder / family, family), {}) for family in ALL_CHAT_FAMILIES
    }
    for name, model in PUBLISHED_MODELS.items():
        try:
            folders[name] = (published_folder(name), model.options)
        except NotAvailable as exc:
            sys.stderr.write(f"{name}: {exc}\n")
    return folders


def main() -> None:
    """The command."""
    import tempfile
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", type=int, default=1_000, help="over all families (1000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prorl-families-") as tiny:
        results = compare_families(available_folders(Path(tiny)), asked.dialogues, asked.processes, asked.seed)
    sys.stdout.write(table(results) + "\n")
    sys.exit(any(result.differences for result in results))


if __name__ == "__main__":
    main()
