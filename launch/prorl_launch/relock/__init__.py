"""`python -m prorl_launch.relock` resolves the locks again."""
