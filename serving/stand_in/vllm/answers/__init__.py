"""How vLLM's server writes answers and errors."""
