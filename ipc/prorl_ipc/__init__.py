"""The floor both sides stand on: framing, RPC and the structs on the wire. Imports nothing of this project."""
