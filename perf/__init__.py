"""Benchmarks. Run one with `python -m perf.NAME [--quick] [--json FILE]`."""
