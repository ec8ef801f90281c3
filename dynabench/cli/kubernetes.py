"""`dynabench kubernetes`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dynabench.cli.groups import FILE
from dynabench.kubernetes.settings import ClusterConfig
from dynabench.kubernetes.write import write_manifests
from foundation.text import printable
from serving.cli.command_line import flat


def kubernetes(
    deployment: Annotated[Path, FILE],
    *,
    out: Path,
    cluster: Annotated[ClusterConfig, flat("Cluster", 1)] = ClusterConfig(),  # noqa: B008 (frozen)
    overwrite: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write the manifests that run a deployment in a Kubernetes cluster, with a kustomization for kubectl apply -k.

    Args:
        deployment: YAML file that describes the deployment: pools, and their settings by name.
        out: The folder to write; files that this command wrote there earlier are replaced.
        cluster: How to run the deployment in the cluster.
        overwrite: Write into a folder that has other files, which stay.
    """
    for path in write_manifests(deployment, cluster, out, overwrite=overwrite):
        print(printable(str(path)))
