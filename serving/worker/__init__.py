"""Workers: the engine protocol, and the code that serves an engine."""
