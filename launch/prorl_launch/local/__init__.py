"""A fleet on one machine, for tests and laptops: the same nodes, discovered in the same way."""
