"""Sessions: the jobs that a trainer submitted, and their outcomes until the trainer acknowledges them."""
