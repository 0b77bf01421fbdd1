"""From what the user typed to a folder on this machine: a path, or a Hugging Face hub id that is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qengine.errors import CheckpointError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "LICENSE*"]


def resolve_folder(model: str | os.PathLike[str], revision: str | None, allow_pickle: bool) -> Path:
    """The folder of the checkpoint, downloaded first if `model` is a hub id. CheckpointError says what to do."""
    name = os.fspath(model)
    if not name:
        raise CheckpointError("the model's name is empty; give a folder or a Hugging Face model id such as 'org/name'")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder not to be entered, ~ of an unknown user
        raise CheckpointError(f"{name}: is no folder that can be opened ({error}); give another path") from error
    if is_file:
        raise CheckpointError(f"{path}: is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.match(name) or ".." in name:
        raise CheckpointError(f"{name}: no such folder, and not a Hugging Face model id such as 'org/name'")
    return _download(name, revision, allow_pickle)


def _download(name: str, revision: str | None, allow_pickle: bool) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, "*.safetensors", *(["*.bin", "*.pt"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the model is gated; accept its terms on its page, then `hf auth login` or set HF_TOKEN"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: has no revision {revision!r}; look at its branches and tags on the hub"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here and no such model on the hub; check the name, or log in if it is private"
        ) from error
    except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, hub.HFValidationError, hub.OfflineModeIsEnabled) as error:
        raise _offline(name, error) from error
    except Exception as error:  # the client lets its HTTP library's own errors through, whichever that is
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in (
            "httpx",
            "httpcore",
            "requests",
            "urllib3",
        ):
            raise _offline(name, error) from error
        raise


def _offline(name: str, error: Exception) -> CheckpointError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{name}: no such folder here, and it could not be fetched from the hub ({first}); "
        "check the name and the connection, or give the path of a downloaded folder"
    )
