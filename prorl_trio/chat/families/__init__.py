"""What differs between model families: how their tool calls and reasoning are written, and how they are told apart."""
