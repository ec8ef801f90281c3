"""Moving KV between workers: one protocol, three ways."""
