"""A deployment as what a Kubernetes cluster runs. Only `write` touches files."""
