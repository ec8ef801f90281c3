"""The command that rehearses a deployment: rehearse."""

import json
from pathlib import Path
from typing import Annotated

from dynabench.cli.groups import FLAT, Output, OutputConfig, plain_errors
from dynabench.cli.serve import ServedFlags
from dynabench.interrupt import Interrupt
from dynabench.rehearsal.settings import RehearseConfig
from foundation.errors import UserError
from foundation.exit_codes import DONE, INTERRUPTED, NOT_GOOD
from serving.cli.command_line import flat


def rehearse(
    deployment: Path | None = None,
    workload: tuple[Path, ...] = (),
    /,
    *,
    config: Annotated[RehearseConfig, flat("Rehearsal", 0)] = RehearseConfig(),  # noqa: B008 (frozen)
    output: Output = OutputConfig(),  # noqa: B008
    flags: Annotated[ServedFlags, FLAT] = ServedFlags(),  # noqa: B008
) -> int:
    """Run the live code of a deployment on virtual time, with faults from a seed, and check what must always hold.

    Frontends, routers and workers run as they would as processes, from the bytes of HTTP to the mocker's frames, in one
    process without a network. A seed decides which requests are sent and what goes wrong: workers are killed, paused,
    cut off, messages are late or lost. The same seed gives the same run.

    Exit code 1: an invariant does not hold; a file replays the least that breaks it.

    Args:
        deployment: YAML file that describes the deployment (default: flags).
        workload: Files that form one workload, whose requests are sent (default: generated ones).
        config: Which seeds, and how much goes wrong.
        output: What to print.
        flags: What describes the deployment.
    """
    from dynabench.rehearsal.all_seeds import lines, replay, run_rehearsal
    from dynabench.rehearsal.files import read
    from dynabench.rehearsal.logs import show_logs
    from dynabench.rehearsal.picture import picture_of
    from dynabench.rehearsal.run import started
    from dynabench.rehearsal.stage.own import check_own
    from workloads.source import is_named_like_a_trace

    console = output.terminal()
    if config.replay is not None:
        if deployment is not None or workload:
            raise UserError(f"--replay {config.replay} has its own deployment and requests; give nothing else")
        with Interrupt():
            with plain_errors():
                described, rehearsal = read(config.replay)
                if rehearsal.own_engine:
                    check_own(rehearsal.own_engine)
                started(described, rehearsal.own_engine)
            show_logs()
            for fault in rehearsal.faults:
                console.item(str(fault))
            outcome = replay(described, rehearsal, config.replay)
        for violation in outcome.violations:
            console.item(str(violation), style="red")
        count = len(outcome.violations)
        console.say(f"digest {outcome.digest}, {count} violation{'s' * (count != 1)}")
        console.verbatim(f"picture: {picture_of(config.replay)}")
        return NOT_GOOD if outcome.violations else DONE
    with plain_errors():
        if deployment is not None and deployment.suffix != ".json" and is_named_like_a_trace(deployment):
            raise UserError(
                f"the first argument is a deployment, and {deployment} is a workload; expected a YAML file before it, "
                f"such as: dynabench rehearse deployment.yaml {deployment}"
            )
        described = flags.deployment(deployment)
    found = run_rehearsal(described, workload, config, console=console)
    for line in lines(found):
        console.say(line)
    if output.json:
        failed = sorted(found.failed, key=lambda each: each.seed)
        seeds = {each.seed: [str(violation) for violation in each.violations] for each in failed}
        happened = dict(sorted(found.happened.items()))
        print(json.dumps({"seeds": found.num_seeds, "happened": happened, "violations": seeds}, indent=2))
    if not found.is_complete:
        return INTERRUPTED
    return NOT_GOOD if found.failed else DONE
