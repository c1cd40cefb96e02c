"""Environments of NeMo Gym: their resources servers as tasks of a node, and turns as their Responses items."""
