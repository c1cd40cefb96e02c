"""`make learn`: a real policy learns to use a tool through a node, and its learning curve is drawn."""
