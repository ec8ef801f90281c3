"""What we know of custom resources, closed: a field that is not here is an error, as an unknown one is to the cluster."""


def closed(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
ANY = {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$", "maxLength": 63}
METADATA = closed(["name", "namespace"], name=NAME, namespace=NAME, labels=TEXTS)
SELECTOR = closed(["matchLabels"], matchLabels=TEXTS)


def resource(api_version, kind, spec):
    return closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


ITEM = closed(cpu=TEXT, memory=TEXT, gpu={"type": "string", "pattern": "^[1-9][0-9]*$"})
SERVICE = closed(
    ["componentType", "replicas", "extraPodSpec"],
    componentType={"enum": ["frontend", "worker", "planner", "main"]},
    subComponentType={"enum": ["prefill", "decode"]},
    replicas=COUNT,
    labels=TEXTS,
    extraPodMetadata=closed(labels=TEXTS, annotations=TEXTS),
    resources=closed(requests=ITEM, limits=ITEM),
    livenessProbe=ANY,
    readinessProbe=ANY,
    extraPodSpec={"type": "object", "required": ["mainContainer"], "not": {"required": ["containers"]}},
)
COMPONENT = closed(
    ["name", "replicas", "podTemplate"],
    name=NAME,
    type={"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
    replicas=COUNT,
    podTemplate=closed(["spec"], metadata=closed(labels=TEXTS, annotations=TEXTS), spec=ANY),
)
ENDPOINT = closed(
    ["port", "path"],
    port=TEXT,
    path=TEXT,
    interval=TEXT,
    honorLabels={"type": "boolean"},
    authorization=closed(["credentials"], type=TEXT, credentials=closed(["name", "key"], name=TEXT, key=TEXT)),
)
TRIGGER = closed(
    ["type", "metadata"],
    type={"const": "prometheus"},
    metadata=closed(["serverAddress", "query", "threshold"], serverAddress=TEXT, query=TEXT, threshold=TEXT),
)

CUSTOM = {
    ("nvidia.com/v1alpha1", "DynamoGraphDeployment"): closed(
        ["services"], services={"type": "object", "additionalProperties": SERVICE, "maxProperties": 25}
    ),
    ("nvidia.com/v1beta1", "DynamoGraphDeployment"): closed(
        ["components"], components={"type": "array", "items": COMPONENT, "maxItems": 25}
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        ["selector", "endpoints"], selector=SELECTOR, endpoints={"type": "array", "items": ENDPOINT}
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        ["selector", "podMetricsEndpoints"], selector=SELECTOR, podMetricsEndpoints={"type": "array", "items": ENDPOINT}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=closed(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=ANY)),
        triggers={"type": "array", "items": TRIGGER, "minItems": 1},
    ),
}
KUSTOMIZATION = closed(
    ["apiVersion", "kind", "resources"],
    apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
    kind={"const": "Kustomization"},
    namespace=NAME,
    resources={"type": "array", "items": TEXT, "uniqueItems": True},
)
