"""Tasks: handlers run them, grading judges them, sets load their data."""
