"""Clients of inference engines: the protocol that each fulfils, and the servers they speak to."""
