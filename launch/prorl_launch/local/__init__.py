"""A fleet on one machine: the same nodes, found in the same way, for tests and laptops."""
