"""Search for agents: backends behind one interface, and the service that bounds, retries and judges their failures."""
