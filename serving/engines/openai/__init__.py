"""Any OpenAI server as an engine."""
