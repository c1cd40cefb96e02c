"""The WebSocket service: sessions of trainers over a persistent connection."""
