"""The flags of `vllm serve`: how they are read, and what is done with each."""
