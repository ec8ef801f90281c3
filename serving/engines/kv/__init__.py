"""KV between workers: offers, notices, leases, and who reads what."""
