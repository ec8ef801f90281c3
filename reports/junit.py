"""JUnit XML, as CI systems show it: a test case for each check of each arm."""

from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from foundation.text import printable
from reports.verdicts.gates import GateResult

CHILD = {"failed": "failure", "undecided": "skipped"}
"""How a check that has not passed is marked; `skipped` is what is closest to undecided."""


def document(name: str, results: Sequence[GateResult], *, created: str, wall_s: Mapping[str, float]) -> str:
    """Return the results of a command; `wall_s` has how long an arm took, which its first test case gets."""
    left = dict(wall_s)
    times = [left.pop(result.arm, 0.0) for result in results]
    counts = Counter(result.state for result in results)
    totals = {"tests": len(results), "failures": counts["failed"], "errors": 0, "time": _seconds(sum(times))}
    root = ElementTree.Element("testsuites", _attributes(name=name, **totals))
    suite = ElementTree.SubElement(
        root, "testsuite", _attributes(name=name, **totals, skipped=counts["undecided"], timestamp=created[:19])
    )
    for result, time in zip(results, times, strict=True):
        case = ElementTree.SubElement(
            suite, "testcase", _attributes(classname=result.arm or name, name=result.check, time=_seconds(time))
        )
        if result.state in CHILD:
            child = ElementTree.SubElement(case, CHILD[result.state], _attributes(type="gate", message=result.text))
            child.text = printable(result.text)
        else:
            ElementTree.SubElement(case, "system-out").text = printable(result.text)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _seconds(time: float) -> str:
    return f"{time:.3f}"


def _attributes(**values: object) -> dict[str, str]:
    return {name: printable(str(value)) for name, value in values.items()}
