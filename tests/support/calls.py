"""Work counted in calls, which no busy machine changes."""

import contextlib
import sys


@contextlib.contextmanager
def at_most(num_calls):
    """Fail what makes more calls than that."""
    left = num_calls

    def count(frame, event, argument):
        nonlocal left
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise AssertionError(f"there were more than {num_calls:,} calls")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
