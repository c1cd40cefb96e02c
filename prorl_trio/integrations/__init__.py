"""Adapters that connect existing trainers to a node."""
