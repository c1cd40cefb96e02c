"""The network services of a node, WebSocket and REST, and the sessions that they share."""
