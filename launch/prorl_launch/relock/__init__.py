"""Resolve the locks again: `python -m prorl_launch.relock`."""
