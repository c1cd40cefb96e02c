"""The table of mutants is in step with the code; `make mutants` runs it."""

from __future__ import annotations

import pytest

from mutants.run import ROOT, missing_tests, read_tables

MUTANTS = read_tables()


def test_each_mutant_fits_the_code_exactly_once():
    stale = [f"{each.kind}: {each.name} ({each.file})" for each in MUTANTS if each.mutated(ROOT) is None]
    assert not stale, "adapt the old text of these entries of tests/mutants to the code, or remove them"


@pytest.mark.parametrize("kind", sorted({each.kind for each in MUTANTS}))
def test_each_mutant_is_code_and_its_tests_are_there(kind):
    for each in MUTANTS:
        if each.kind == kind:
            compile(each.mutated(ROOT) or "", each.name, "exec", dont_inherit=True)
            assert each.old != each.new, each.name
            assert each.tests, each.name
            assert not missing_tests(each), each.name


def test_each_mutant_has_a_name_of_its_own():
    names = [each.name for each in MUTANTS]
    assert sorted(names) == sorted({*names})
