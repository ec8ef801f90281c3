"""Planner policies by name."""

from serving.planner.policies.dynamo_load import DynamoLoad
from serving.planner.policies.hpa import Hpa
from serving.planner.policies.policy import Policy
from serving.planner.policies.static import Static

PLANNERS: dict[str, type[Policy]] = {
    "static": Static,
    "hpa": Hpa,
    "dynamo-load": DynamoLoad,
}
"""Every planner policy by name; the CLI, the docs and the reports list them from here."""
