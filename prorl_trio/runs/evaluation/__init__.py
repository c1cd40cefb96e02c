"""Evaluations: rollouts of a task set, pass@k with its uncertainty, and recorded rollouts graded again."""
