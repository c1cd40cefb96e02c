"""The paper's tables and figures measured anew, in one report."""
