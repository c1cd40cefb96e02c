"""The pool of backends: placement, health, load, pauses, and completions that go on elsewhere."""
