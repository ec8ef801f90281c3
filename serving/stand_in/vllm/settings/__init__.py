"""What a stand-in is made of: settings, its simulated engine, its KV and its ranks."""
