"""What Python's users call: the commands as functions, and results as objects. `import dynabench as db` has all of it."""
