"""A Kubernetes cluster as this project uses it: its API, discovery in it, and what it must allow for both."""
