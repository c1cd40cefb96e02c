"""Puts nodes, engines and sandboxes on machines: set-up, doctor, local vLLM, the demo."""
