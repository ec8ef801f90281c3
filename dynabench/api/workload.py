"""A workload as Python's users make one: of files, of settings, or of a data frame."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import workloads
from dynabench.api.arguments import checked, path_of
from dynabench.experiment.workload_file import read_workload, write_workload
from foundation.errors import UserError
from foundation.settings import settings_of
from workloads import formats
from workloads.describe import Description, describe_workload
from workloads.synthesize import SynthConfig, synthesize


class Workload(workloads.Workload):
    """Requests in order of arrival: what `simulate` and the other functions send."""

    __slots__ = ()

    @classmethod
    @checked
    def read(
        cls,
        *paths: str | Path,
        format: str | None = None,
        columns: str | None = None,
        block_size: int | None = None,
        tokenizer: str | None = None,
    ) -> Self:
        """Read a workload from files, plain or .gz, or folders; without any, a small bundled one.

        Args:
            paths: files and folders that form one workload.
            format: the name of the format, as `dynabench workload formats` lists them (none: detected).
            columns: the columns of a log, as in `arrival=ts,input=prompt_tokens,output=completion_tokens`.
            block_size: tokens that each hash id stands for (none: the format's).
            tokenizer: folder or Hugging Face id of a model whose tokenizer counts the tokens of texts (none: estimated).

        Raises:
            UserError: a file cannot be read, or has no requests.
        """
        files = [path_of("paths", path) for path in paths]
        return cls._of(read_workload(files, format=format, columns=columns, block_size=block_size, tokenizer=tokenizer))

    @classmethod
    @checked
    def synth(cls, name: str = "synthetic", **settings: Any) -> Self:
        """Generate a workload; the same settings give the same one.

        Args:
            name: what results call it.
            settings: as of `dynabench workload synth`, such as `requests=1200, rate=5, isl=2048, osl=128, prefix_groups=40`
                (lengths in tokens, `rate` in sessions per second).

        Raises:
            UserError: there is no such setting, or its value is invalid.
        """
        config = settings_of(SynthConfig, settings)
        return cls(name, config.block_size, synthesize(config))

    @classmethod
    @checked
    def from_frame(
        cls,
        frame: Any,
        *,
        arrival: str | int,
        input: str | int,
        output: str | int,
        name: str = "frame",
        block_size: int | None = None,
        **columns: str | int,
    ) -> Self:
        """Make a workload of the rows of a data frame: of pandas, polars or Arrow.

        Args:
            frame: a row per request, in any order.
            arrival: the column with arrivals: numbers, timestamps or durations. The unit of numbers is recognised, or
                follows after a colon: `ts:ms`. Columns have names, or are numbered.
            input: the column with the length of each prompt (tokens).
            output: the column with the length of each answer (tokens).
            name: what results call it.
            block_size: tokens that each hash id stands for (none: 512).
            columns: more columns, for `session`, `hash_ids` (what prompts share; without it nothing is shared),
                `priority` and `adapter`.

        Raises:
            UserError: it is not a data frame, a column is missing, or has a value that is not understood.
        """
        names = {"arrival": arrival, "input": input, "output": output, **columns}
        if unnamed := next((field for field, name in names.items() if not isinstance(name, (str, int))), None):
            raise UserError(f"{unnamed} is {names[unnamed]!r}; expected the name of a column")
        texts = {field: str(name) for field, name in names.items()}
        return cls._of(formats.read_frame(frame, texts, title=name, block_size=block_size))

    @checked
    def write(self, path: str | Path, format: str = formats.DEFAULT) -> None:
        """Write it to a new file, compressed if its name ends in .gz.

        Args:
            path: the file, which must not exist.
            format: the name of a format that can be written (default: dynabench's own, which loses nothing).

        Raises:
            UserError: the format cannot be written, or the file exists or cannot be written.
        """
        file = path_of("path", path)
        formats.check_name(file, format)
        write_workload(self, file, format)

    def describe(self) -> Description:
        """Return its figures: requests, rate (1/s), lengths (tokens), and how much of its prompts is shared."""
        return describe_workload(self)

    def __repr__(self) -> str:
        said = f"{self.name}: {len(self):,} requests in {self.duration_s:,.1f} s"
        if not len(self):
            return f"<Workload {said}>"
        isl, osl = self.columns.input_length.mean(), self.columns.output_length.mean()
        return f"<Workload {said}; mean ISL {isl:,.0f} tokens; mean OSL {osl:,.0f} tokens>"

    @classmethod
    def _of(cls, made: workloads.Workload) -> Self:
        return cls(**{field.name: getattr(made, field.name) for field in fields(made)})
