"""Charts as PNG files, for slides and issues, made from the SVG files in every results folder."""

import re
from pathlib import Path

from foundation.errors import UserError
from foundation.extras import install
from foundation.files import new_file

SCALE = 2
"""Pixels per unit in each direction; sharp on most screens."""
MOST_UNITS, MOST_BYTES = 4_000, 1 << 24
"""Larger than any chart that we draw; a folder may come from somebody else."""
_SIZE = re.compile(r'viewBox="-?[\d.]+ -?[\d.]+ ([\d.]+) ([\d.]+)"')


def write(folder: Path, out: Path) -> list[Path]:
    """Write the charts of a run's, sweep's or plan's folder into a new folder; return the files.

    Raises:
        UserError: there are none, one is not a chart, or the package that draws them is not installed.
        OSError: the new folder exists, or cannot be written.
    """
    try:
        import matplotlib as mpl  # for its fonts
        import resvg_py
    except ImportError as error:
        raise UserError(
            f"--to png needs the Python package {error.name}, which is not installed: {install('png')}"
        ) from None
    charts = sorted((folder / "charts").glob("*.svg"))
    if not charts:
        raise UserError(f"{folder} has no charts; expected the folder of a run, sweep or plan")
    fonts = str(Path(mpl.get_data_path()) / "fonts" / "ttf")
    pictures = {
        chart.stem: resvg_py.svg_to_bytes(
            svg_string=_checked(chart),
            background="#ffffff",
            zoom=SCALE,
            skip_system_fonts=True,
            font_dirs=[fonts],
            sans_serif_family="DejaVu Sans",
        )
        for chart in charts
    }
    out.mkdir()
    files = []
    for name, picture in pictures.items():
        files.append(out / f"{name}.png")
        with new_file(files[-1]) as file:
            file.write(picture)
    return files


def _checked(chart: Path) -> str:
    """Return a file's content, unless it is larger than any chart."""
    with chart.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    text = data.decode(errors="replace")
    size = _SIZE.search(text)
    if len(data) > MOST_BYTES or size is None or max(map(float, size.groups())) > MOST_UNITS:
        raise UserError(f"{chart} is not a dynabench chart")
    return text
