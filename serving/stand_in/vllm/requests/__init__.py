"""How vLLM's server reads and checks requests."""
