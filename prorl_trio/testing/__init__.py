"""Fakes, fault injection and contract suites. Product code: use it in your own tests."""
