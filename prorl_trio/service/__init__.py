"""The trainer-facing edge."""
