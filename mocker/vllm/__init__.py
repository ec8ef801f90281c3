"""vLLM's scheduler: who runs, with how many tokens, in which blocks, and what goes to host memory."""
