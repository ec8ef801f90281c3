"""python -m dynabench."""

from dynabench.cli.app import main

main()
