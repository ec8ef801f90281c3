"""Workers: the engine protocol, and what serves an engine."""
