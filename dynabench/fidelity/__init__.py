"""Compare the simulator with real engines."""
