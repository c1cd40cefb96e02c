"""A reference trainer: small, readable, and the one that the examples and tests train with."""
