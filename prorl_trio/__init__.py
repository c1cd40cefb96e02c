"""Rollout-as-a-service for RL training of multi-turn LLM agents."""
