"""Checks of the reference trainer, run in the trainers' environment by `test_learn.py`: one process for all of them.

Each function `check_*` is one. A folder of its own is its argument.
"""
