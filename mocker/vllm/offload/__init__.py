"""What vLLM's scheduler keeps in host memory, as with its OffloadingConnector."""
