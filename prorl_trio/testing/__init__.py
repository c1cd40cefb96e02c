"""Fakes, fault injection and contract suites. They are part of the product: use them in your own tests."""
