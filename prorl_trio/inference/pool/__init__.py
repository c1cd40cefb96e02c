"""The pool of backends: placement, health, load, pauses, and completions continued on other backends."""
