"""`python -m serving.mocker`: mocker workers."""

from serving.cli.commands import mocker_app, run_app

if __name__ == "__main__":
    run_app(mocker_app, "serving.mocker")
