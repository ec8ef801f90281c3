"""Render a deployment as objects for a Kubernetes cluster. Only `write` touches files."""
