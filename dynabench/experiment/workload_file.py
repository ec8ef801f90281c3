"""Read workload files; write them completely or not at all."""

from collections.abc import Sequence
from pathlib import Path

from foundation.files import new_file
from foundation.settings import SWITCHES
from workloads import Workload, WorkloadError, formats
from workloads.blocks import Encode


def read_workload(
    files: Sequence[Path],
    *,
    format: str | None = None,
    columns: str | None = None,
    block_size: int | None = None,
    tokenizer: str | None = None,
) -> Workload:
    """Read a workload (none: the bundled one).

    Args:
        files: files and folders that make up one workload.
        format: name of the format (none: detected).
        columns: the meaning of a log's columns, instead of a format.
        block_size: tokens that each id represents (none: the format's).
        tokenizer: folder, file or Hugging Face id of a model whose tokenizer counts the tokens of texts.

    Raises:
        WorkloadError: it cannot be read, or contains no requests.
    """
    for file in files:
        _refuse_other_things(file)
    encode = _encoder(tokenizer)
    workload = formats.read(
        files or formats.BUNDLED, format=format, columns=columns, block_size=block_size, encode=encode
    )
    if not len(workload):
        raise WorkloadError(f"{' '.join(map(str, files))}: contains no requests")
    return workload


def _refuse_other_things(file: Path) -> None:
    """Refuse what is meant for an option."""
    if file.suffix in (".yaml", ".yml"):
        raise WorkloadError(f"{file}: YAML is not a format of workloads; give a deployment with -f {file}")
    if str(file) in SWITCHES and not file.exists():
        raise WorkloadError(f"{file}: there is no such file; a switch takes its value after =, as in --oracle={file}")


def write_workload(workload: Workload, out: Path, format: str = formats.DEFAULT) -> None:
    """Write a workload to a new file, compressed if its name ends in .gz.

    Raises:
        OSError: the file exists or cannot be written.
    """
    with new_file(out) as file:
        formats.write(workload, format, file)


def _encoder(tokenizer: str | None) -> Encode | None:
    if tokenizer is None:
        return None
    from serving.model.errors import ModelError
    from serving.model.files import ModelFiles
    from serving.model.tokenizer import load_tokenizer

    try:
        model = load_tokenizer(ModelFiles.read(tokenizer), encodes=True)
    except ModelError as error:
        raise WorkloadError(f"the tokenizer cannot be loaded: {error}") from error
    return lambda text: model.encode(text, special=False).tolist()
