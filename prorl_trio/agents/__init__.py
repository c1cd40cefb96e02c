"""Presets: how agents that people already have are installed, pointed at the gateway, and started."""
