"""A reference trainer: small, readable, and the one that the examples and tests train with. Extra `train`."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("prorl_trio.learn needs torch: pip install 'prorl-trio[train]'", name="torch")
