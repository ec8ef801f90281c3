"""`dynabench completion`: cyclopts' own scripts, mended where they would not complete files or could not be sourced."""

from typing import Literal

FILES = """COMPREPLY=( $(compgen -f -- "${cur}") )"""
"""How cyclopts completes files in bash: it splits names with spaces and adds a space after a folder's name."""

WHOLE_FILES = """_dynabench_files() {
  local IFS=$'\\n'
  compopt -o filenames 2>/dev/null
  COMPREPLY=( $(compgen -f -- "${cur}") )
}
"""


EITHER_WAY = """
if [[ $funcstack[1] == _dynabench ]]; then
  _dynabench "$@"
else
  compdef _dynabench dynabench
fi
"""
"""For zsh: the script is either the file `_dynabench` in fpath, or sourced."""


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes dynabench's commands, flags and values in your shell.

    Nothing is installed. To try it in this shell: `source <(dynabench completion bash)` (or zsh); in fish: `dynabench completion fish | source`.

    Args:
        shell: The shell that the script is for.
    """
    from dynabench.cli.app import app  # which names this command

    script = app.generate_completion(shell=shell)
    if shell == "bash":
        script = script.replace(FILES, "_dynabench_files") + WHOLE_FILES
    if shell == "zsh":
        script = script.replace("_cyclopts_dynabench", "_dynabench") + EITHER_WAY
    print(script)
