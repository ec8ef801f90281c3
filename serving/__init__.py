"""The serving stack: frontend, router, workers, engines."""
