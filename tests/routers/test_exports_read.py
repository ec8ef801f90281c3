"""Files that we write for AIPerf and guidellm are read by their own loaders, with the figures that we mean."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from reports import exports
from tests.reports.runs import MANIFEST, live
from tests.routers.fleet import needs

AIPERF = """
import json, sys
from pathlib import Path
from aiperf.common.models.export_models import JsonExportData
from aiperf.common.models.record_models import MetricRecordInfo
from aiperf.plot.core.data_loader import DataLoader
folder = Path(sys.argv[1])
export = JsonExportData.model_validate_json((folder / "profile_export_aiperf.json").read_text())
rows = [MetricRecordInfo.model_validate_json(row) for row in (folder / "profile_export.jsonl").read_text().splitlines()]
run = DataLoader().load_run(folder)
print(json.dumps([export.time_to_first_token.avg, export.inter_token_latency.avg, len(rows), len(run.requests)]))
"""


def answer(tool, *arguments):
    """Run a program with the Python of a tool's environment; return the last line that it prints, as JSON."""
    command = [Path(shutil.which(tool)).with_name("python"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


@needs("aiperf")
def test_aiperf_loads_our_folder_of_a_run(tmp_path):
    for name, data in exports.export_files(MANIFEST, [live()], "aiperf").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert answer("aiperf", "-c", AIPERF, tmp_path / "a") == [1500.0, 1000.0, 3, 3]


@needs("guidellm")
@pytest.mark.parametrize("load", [{}, {"concurrency": 4}])
def test_guidellm_exports_our_report_to_its_other_formats(load, tmp_path):
    (tmp_path / "ours.json").write_bytes(exports.export(MANIFEST | {"load": load}, [live(), live("b")], "guidellm"))
    kinds = ("kind=console", "kind=csv,path=ours.csv", "kind=html,path=ours.html")
    command = ["guidellm", "export", "ours.json", *(part for kind in kinds for part in ("--output", kind))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path)
    assert "loaded 2 benchmark(s)" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "| 1500.0 |" in line]
    assert len(rows) == 2, done.stdout
    assert (tmp_path / "ours.csv").stat().st_size and (tmp_path / "ours.html").stat().st_size
