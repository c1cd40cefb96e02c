"""The WebSocket service: sessions of trainers over a standing connection."""
