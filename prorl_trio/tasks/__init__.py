"""What a task is: handlers run it, grading judges it, sets load its data."""
