"""`python -m launch.relock` resolves the locks again."""
