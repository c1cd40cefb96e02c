"""The daemon inside a sandbox: bash, IPython and files behind one Unix socket. Light; never imports the node."""
