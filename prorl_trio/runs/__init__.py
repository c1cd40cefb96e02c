"""Recorded outcomes: written, read, reported, compared, and evaluated."""
