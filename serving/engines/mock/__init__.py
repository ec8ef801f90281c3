"""The mocker as a live engine."""
