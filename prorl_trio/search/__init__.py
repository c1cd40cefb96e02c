"""Search for agents: backends with one interface, and the service that bounds, retries and classifies their failures.
"""
