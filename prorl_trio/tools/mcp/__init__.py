"""Tools of MCP servers: a client of both eras of the protocol, with the limits of a rollout. It needs the extra `mcp`.

Nothing here imports the package `mcp` but `sessions`, which takes a second: see `open_servers`.
"""
