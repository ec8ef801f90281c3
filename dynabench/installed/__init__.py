"""The schedulers of installed engines, each in a process of its own."""
