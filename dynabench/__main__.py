"""python -m dynabench."""

from dynabench.cli import main

main()
