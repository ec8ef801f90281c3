"""What is vLLM's: the flags of `vllm serve`, and how its server talks."""
