"""A small, readable reference trainer, used by the examples and tests. Requires the extra `train`."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("prorl_trio.learn needs torch: pip install 'prorl-trio[train]'", name="torch")
