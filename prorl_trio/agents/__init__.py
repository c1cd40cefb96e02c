"""Presets: how to install and start existing agents, and how to connect them to the gateway."""
