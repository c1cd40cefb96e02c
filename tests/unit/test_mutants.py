"""The table of mutants is in step with the code; `make mutants` runs it."""

from __future__ import annotations

import ast

import pytest

from mutants.run import ROOT, missing_tests, read_tables

MUTANTS = read_tables()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code_and_has_its_tests(mutant):
    text = mutant.mutated(ROOT)
    assert text is not None, f"its old text is not in {mutant.file} exactly once: adapt it to the code"
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / mutant.file).read_text())), "it changes nothing"
    assert mutant.tests
    assert not missing_tests(mutant)


def test_each_mutant_has_a_name_of_its_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len({*names})
