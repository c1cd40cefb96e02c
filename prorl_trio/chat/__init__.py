"""Messages to token ids and back, for each model family, with proof that no token is ever rewritten."""
