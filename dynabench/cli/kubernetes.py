"""`dynabench kubernetes`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dynabench.kubernetes.settings import ClusterConfig
from dynabench.kubernetes.write import write
from foundation.text import printable
from serving.cli.command_line import flat


def kubernetes(
    deployment: Path,
    /,
    *,
    out: Path,
    cluster: Annotated[ClusterConfig, flat("Cluster", 1)] = ClusterConfig(),  # noqa: B008 (frozen)
    overwrite: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write what runs a deployment in a Kubernetes cluster: manifests with a kustomization, for kubectl apply -k.

    Args:
        deployment: the deployment (YAML); see docs/deployment.md.
        out: the folder to write; files that this command wrote there before are replaced.
        cluster: how the deployment is put into the cluster.
        overwrite: write into a folder that holds other files; they stay.
    """
    for path in write(deployment, cluster, out, overwrite=overwrite):
        print(printable(str(path)))
