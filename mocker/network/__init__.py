"""Links that carry KV: what they are like, and how transfers share them; without a clock."""
