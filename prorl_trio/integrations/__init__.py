"""Adapters for the trainers that people use: each is the seam of one of them over a node."""
