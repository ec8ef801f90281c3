"""A store of KV that workers share: a process that keeps chunks, and a worker's side of it."""
