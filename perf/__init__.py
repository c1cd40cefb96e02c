"""Benchmarks. Each: `python -m perf.NAME [--quick] [--json FILE]`."""
