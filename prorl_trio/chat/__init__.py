"""Messages to token ids and back, for each model family, with a proof that no token is ever rewritten."""
