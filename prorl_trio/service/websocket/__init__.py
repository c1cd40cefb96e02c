"""The WebSocket edge."""
