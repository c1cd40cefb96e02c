"""Patches of rows: what is mended, what is refused, and git's own opinion of it."""

from __future__ import annotations

import subprocess

import pytest

from prorl_trio.tasks.grading.row_patches import forms_of_patch, read_patch

OLD = "one\ntwo\n\n\nfive\nsix\n\n"
BODY = "@@ -1,7 +1,8 @@\n one\n-two\n+2\n+2.5\n \n \n five\n six\n \n"
HEAD = "diff --git a/f.txt b/f.txt\n--- a/f.txt\n+++ b/f.txt\n"
PATCH = HEAD + BODY
NEW_FILE = "diff --git a/new b/new\nnew file mode 100644\nindex 0000000..1234567\n--- /dev/null\n+++ b/new\n"
NEW_FILE += "@@ -0,0 +1 @@\n+x\n"


def takes(folder, patch, old=OLD):
    """Return whether git applies a patch, and what the file is then."""
    (folder / "f.txt").write_bytes(old.encode())
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(argv, cwd=folder, input=patch.encode(), capture_output=True, check=False)
    return (folder / "f.txt").read_bytes().decode() if done.returncode == 0 else None


GOOD = {
    "as it is": PATCH,
    "no last newline": PATCH[:-1],
    "stripped": PATCH.strip(),
    "stripped in the middle of its blank lines": HEAD + "@@ -3,2 +3,3 @@\n+2\n \n ".strip() + "\n",
    "blank lines without a blank": PATCH.replace("\n \n", "\n\n"),
    "of git format-patch": f"From 12ab Mon Sep 17\nSubject: x\n\n---\n f.txt | 2 +-\n\n{PATCH}-- \n2.39.5\n\n",
    "two files": NEW_FILE + PATCH,
}


@pytest.mark.parametrize("how", GOOD)
def test_what_can_be_mended_applies(how, tmp_path):
    (whole,) = forms_of_patch(GOOD[how], "test_patch")
    assert whole == read_patch(whole, "test_patch")
    assert takes(tmp_path, whole) is not None


@pytest.mark.parametrize(
    "patch",
    [
        *("diff --git a/x.py ...\n", "I could not solve it.", HEAD),
        *(PATCH.replace("+2.5\n", ""), PATCH.replace(" five\n", ""), PATCH[: PATCH.index(" five")]),
        *(PATCH.replace(" five\n", "five\n"), PATCH + "and then\n", PATCH + " seven\n", PATCH + "+seven\n"),
        *(PATCH.replace("-1,7", "-1,6"), NEW_FILE.replace("+1 @@", "+1,2 @@")),
    ],
)
def test_what_was_cut_or_changed_is_refused_with_its_field(patch, tmp_path):
    with pytest.raises(ValueError, match=r"^test_patch.*(M|m)end the row, or leave it out$"):
        read_patch(patch, "test_patch")


def test_ends_of_lines_are_those_of_the_file(tmp_path):
    forms = list(forms_of_patch(PATCH.replace("\n", "\r\n"), "test_patch"))
    assert [takes(tmp_path, form) is not None for form in forms] == [False, False, True]
    windows = OLD.replace("\n", "\r\n")
    found = [takes(tmp_path, form, windows) for form in forms]
    assert found[1] == windows.replace("two\r\n", "2\r\n2.5\r\n")
    mixed = HEAD + BODY.replace("\n", "\r\n").replace("@@\r\n", "@@\n")  # as git writes it
    (whole,) = forms_of_patch(mixed, "test_patch")
    assert takes(tmp_path, whole, windows) == found[1]
