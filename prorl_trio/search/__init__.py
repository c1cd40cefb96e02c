"""Search for agents: backends with one interface, and a service that bounds, retries and classifies their failures."""
