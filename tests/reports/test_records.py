"""The record of a run: what its columns are, how it is filled, and how it is written and read back."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from reports.record.records import COLUMNS, Record, RequestLog, Requests
from reports.record.table import from_columns, to_table

PAGE = Path(__file__).parent.parent.parent / "docs" / "reading-a-report.md"
TYPES = {np.int32: "int32", np.float64: "float64", np.bool_: "bool", np.object_: "text"}


def from_table(table, num_runs):
    return from_columns(table.column_names, table.column, num_runs)


def two(**columns):
    return Requests.of(intended_s=[0.0, 1.0], isl=[100, 200], **columns)


def test_what_is_left_out_is_unknown_or_holds_its_default():
    made = two(worker=[None, 3])
    assert made.request.tolist() == [0, 1]
    assert made.worker.tolist() == [None, 3]
    assert made.sent_s.tolist() == [None, None]
    assert (made.error.tolist(), made.is_measured.tolist(), made.osl.tolist()) == (["", ""], [True, True], [0, 0])


def test_no_value_stands_for_unknown():
    made = two(cached_tokens=[None, 50], first_token_s=np.array([np.nan, 1.5]))
    assert made.cached_tokens.sum() == 50
    assert made.cached_tokens.count() == 1
    assert made.first_token_s.mask.tolist() == [True, False]
    assert (made.cached_tokens < 0).sum() is np.ma.masked or (made.cached_tokens < 0).sum() == 0


def test_a_column_that_must_be_known_cannot_be_left_out():
    with pytest.raises(TypeError, match="requests need the column isl"):
        Requests.of(intended_s=[0.0])
    with pytest.raises(TypeError, match="requests have no column islands"):
        two(islands=[1, 2])


def test_rows_are_taken_by_mask_number_or_slice():
    made = two(worker=[None, 3])
    assert made[np.array([False, True])].worker.tolist() == [3]
    assert made[[1, 0]].isl.tolist() == [200, 100]
    assert len(made[:1]) == 1


def test_records_are_joined_row_by_row():
    joined = Requests.concatenate([two(worker=[None, 3]), two(worker=[4, 5]).replace(request=[2, 3])])
    assert joined.worker.tolist() == [None, 3, 4, 5]
    assert joined.request.tolist() == [0, 1, 2, 3]
    assert not isinstance(joined.isl, np.ma.MaskedArray)


def test_a_record_travels_between_processes():
    made = pickle.loads(pickle.dumps(two(worker=[None, 3])))
    assert made.worker.tolist() == [None, 3]


def test_a_column_of_equal_rows_takes_and_travels_as_one_value():
    made = Requests.of(intended_s=np.arange(1e5), isl=np.full(100_000, 7))
    assert len(pickle.dumps(made)) < 13 * 100_000, "8 bytes for the time, and 4 for the number"
    again = pickle.loads(pickle.dumps(made))
    for each in (made, again):
        assert each.isl.strides == each.worker.strides == each.worker.mask.strides == each.error.strides == (0,)
        assert (each.isl[99_999], each.worker[5], each.succeeded.all()) == (7, np.ma.masked, True)


def test_a_log_is_written_by_number_and_what_is_never_written_is_unknown():
    log = RequestLog(3)
    log.intended_s[0] = log.intended_s[2] = 0.5
    log.isl[0], log.worker[2], log.first_token_s[2] = 7, 0, 1.5
    log.error[0] = "timeout"
    done = log.finish()
    assert done.worker.tolist() == [None, None, 0]
    assert done.first_token_s.tolist() == [None, None, 1.5]
    assert done.error.tolist() == ["timeout", "", ""]
    assert done.succeeded.tolist() == [False, True, True]
    assert log.finish(np.array([2])).request.tolist() == [2]


def test_a_log_takes_whole_columns_at_its_end():
    log = RequestLog(2)
    log.intended_s[:] = log.intended_s[::-1]
    assert log.finish(isl=[1, 2], sent_s=[None, 3.0]).sent_s.tolist() == [None, 3.0]


def test_a_log_has_only_the_columns_of_a_record():
    with pytest.raises(AttributeError, match="requests have no column wrkr"):
        RequestLog(1).wrkr[0] = 5


def test_the_copy_of_a_log_is_another_log():
    log = RequestLog(1)
    log.worker[0] = 1
    fork = copy.deepcopy(log)
    fork.worker[0] = 2
    assert log.worker[0] == 1


def test_warm_up_requests_are_not_measured():
    run = Record("a", two(is_measured=[False, True]), np.empty((0, 5)), 1.0, 1)
    assert run.measured.requests.request.tolist() == [1]
    assert run.measured.measured.requests.request.tolist() == [1]


def test_unknown_is_null_in_the_table_and_comes_back_unknown():
    runs = [
        Record("a", two(worker=[None, 3], error=["", "no"]), np.empty((0, 5)), 1.0, 4),
        Record("b", two(sent_s=[0.25, None]), np.empty((0, 5)), 1.0, 4, repeat=1),
    ]
    table = to_table(runs)
    assert table.column_names == ["run", "arm", "repeat", *COLUMNS]
    assert table["worker"].to_pylist() == [None, 3, None, None]
    assert table["arm"].to_pylist() == ["a", "a", "b", "b"]
    for run, read in zip(runs, from_table(table, 2), strict=True):
        for name in COLUMNS:
            assert getattr(read, name).tolist() == getattr(run.requests, name).tolist(), name


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("isl", [100, None], "isl in requests.parquet is not a column of finite numbers"),
        ("isl", ["a", "b"], "isl in requests.parquet is not a column of finite numbers"),
        ("first_token_s", [0.1, float("inf")], "first_token_s in requests.parquet is not a column of finite numbers"),
        ("error", [1, 2], "error in requests.parquet is not text"),
        ("is_measured", [0, 1], "is_measured in requests.parquet is not true or false"),
        ("cached_tokens", [-1, 5], "cached_tokens in requests.parquet ranges from -1 to 5"),
        ("worker", [0, 1_000_000], "worker in requests.parquet ranges from 0 to 1000000"),
    ],
)
def test_a_column_that_holds_what_it_cannot_is_named(name, values, problem):
    table = to_table([Record("a", two(), np.empty((0, 5)), 1.0, 1)])
    table = table.set_column(table.column_names.index(name), name, pa.array(values))
    with pytest.raises(ValueError, match=problem):
        from_table(table, 1)


def test_a_missing_column_that_must_be_known_is_named():
    table = to_table([Record("a", two(), np.empty((0, 5)), 1.0, 1)]).drop_columns("isl")
    with pytest.raises(ValueError, match="has no column isl"):
        from_table(table, 1)


def test_a_column_that_a_folder_is_too_old_to_have_is_unknown():
    made = two(worker=[0, 3], prefill_worker=[1, None])
    table = to_table([Record("a", made, np.empty((0, 5)), 1.0, 4)]).drop_columns(["prefill_worker", "transfer_end_s"])
    (read,) = from_table(table, 1)
    assert read.worker.tolist() == [0, 3]
    assert read.prefill_worker.tolist() == [None, None]
    assert read.transfer_end_s.tolist() == [None, None]


def test_the_page_lists_every_column_as_the_class_describes_it():
    text = PAGE.read_text()
    for column in COLUMNS.values():
        may_be_unknown = "yes" if column.may_be_unknown else ""
        row = f"| `{column.name}` | {TYPES[column.dtype]} | {column.unit} | {may_be_unknown} | {column.meaning} |"
        assert row in text, row
