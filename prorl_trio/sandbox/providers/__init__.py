"""Sandbox providers: Apptainer, bubblewrap, and plain processes."""
