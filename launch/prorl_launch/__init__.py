"""Installs and starts nodes, engines and sandboxes on machines: set-up, doctor, local vLLM, the demo."""
