"""What a model is made of, read from its config.json: layers, weights, KV, and the layouts that it can be divided into."""
