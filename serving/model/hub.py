"""Names and downloads of Hugging Face models. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are honoured."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.model.errors import ModelError

SCHEME = "hf://"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.model", "*.tiktoken", "*.py")
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(model_path: str) -> bool:
    """Return whether a path names a model of the hub: explicitly, or as an id that is not the name of a local file."""
    if model_path.startswith(SCHEME):
        return True
    is_local = model_path.startswith((".", "/", "~")) or model_path.endswith(".gguf") or Path(model_path).exists()
    return not is_local and REPOSITORY.fullmatch(model_path) is not None


def model_name(model_path: str) -> str:
    """Derive the served name: the repository, folder or file name."""
    if is_hub_id(model_path):
        return model_path.removeprefix(SCHEME).rstrip("/")
    local = Path(os.path.abspath(Path(model_path).expanduser()))  # noqa: PTH100 (links keep their own names)
    return local.stem if local.suffix == ".gguf" else local.name


def fetch(model_path: str, patterns: Sequence[str]) -> Path:
    """Download the files of a model that match, unless they are in the cache; return the folder.

    Raises:
        ModelError: they cannot be downloaded.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    name = model_path.removeprefix(SCHEME)
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{name}"
        raise ModelError(
            f"{name} is gated: ask for access at {page}, and set HF_TOKEN to a token that has it"
        ) from error
    except RepositoryNotFoundError as error:
        private = "" if os.environ.get("HF_TOKEN") else "; if it is private, set HF_TOKEN"
        raise ModelError(
            f"{name} is neither a local folder or file nor a model at {constants.ENDPOINT}{private}"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{name} is neither a local folder or file nor a Hugging Face id") from error
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            why = "HF_HUB_OFFLINE is set and the cache does not have it"
        else:
            why = f"{constants.ENDPOINT} cannot be reached ({_first_line(error.__cause__ or error)})"
        raise ModelError(f"{name} is not a local folder or file, and cannot be downloaded: {why}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{name} cannot be downloaded from {constants.ENDPOINT}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
