"""Tools the policy may call, bound to a sandbox."""
