"""Clients of inference engines: their common protocol, and one client per kind of server."""
