"""LLM backends: engine clients, and the pool that places tasks on them."""
