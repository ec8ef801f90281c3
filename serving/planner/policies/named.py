"""Planner policies by name."""

from serving.planner.policies.dynamo_load import DynamoLoad
from serving.planner.policies.dynamo_sla import DynamoSla
from serving.planner.policies.dynamo_sla_2025 import DynamoSla2025
from serving.planner.policies.hpa import Hpa
from serving.planner.policies.kpa import Kpa
from serving.planner.policies.lead_time import LeadTime
from serving.planner.policies.policy import Policy
from serving.planner.policies.static import Static
from serving.planner.policies.wva import Wva

PLANNERS: dict[str, type[Policy]] = {
    "static": Static,
    "hpa": Hpa,
    "kpa": Kpa,
    "wva": Wva,
    "dynamo-load": DynamoLoad,
    "dynamo-sla": DynamoSla,
    "dynamo-sla-2025": DynamoSla2025,
    "lead-time": LeadTime,
}
"""Every planner policy by name; the CLI, the docs and the reports list them from here."""
