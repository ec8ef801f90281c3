"""The bytes of the mocker's KV: handed to peers, in host memory, and in tiers behind it."""
