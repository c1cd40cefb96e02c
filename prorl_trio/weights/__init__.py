"""Weights as files: safetensors read and written, folders checked before engines see them, private folders."""
