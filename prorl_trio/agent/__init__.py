"""The agent in RUN: its loop, context, dialogues, budgets and scoring."""
