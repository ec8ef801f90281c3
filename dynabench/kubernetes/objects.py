"""The type of what is written for a cluster."""

from typing import Any

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one, as YAML holds it."""
