"""The models of a run on the hub: checked before training, uploaded after it.

huggingface_hub is imported only where a run uploads: it reads the environment once, which `hub` may still change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo.train.errors import ConfigError, OutputError, shown
from exgrpo.train.hub import offline_reason

if TYPE_CHECKING:
    from exgrpo.train.config import OutputConfig

WITHOUT = "or leave it out, and upload later by `hf upload`"


def check_upload(output: "OutputConfig") -> None:
    """Whether the hub will take the model: make its repository, if it is not there.

    Raises:
        ConfigError: there is no model to upload, no token, no such name, or no hub that answers.
    """
    name = output.push_to_hub
    if name is None:
        return
    if not output.save_model:
        raise ConfigError("output.push_to_hub uploads the model that output.save_model=False does not save: take True")
    if name.count("/") != 1:
        raise ConfigError(f"output.push_to_hub: {shown(name)} is not OWNER/NAME")
    if reason := offline_reason():
        raise ConfigError(f"output.push_to_hub: {reason}: see that the hub can be reached, {WITHOUT}")
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(f"output.push_to_hub needs a token: run `hf auth login` or set HF_TOKEN, {WITHOUT}")
    try:
        HfApi().create_repo(name, private=output.private, exist_ok=True)
    except Exception as error:  # the hub and the network fail in ways of their own
        raise ConfigError(f"output.push_to_hub: {name} cannot be made: {shown(error)}; mend that, {WITHOUT}") from error


def upload(name: str, folders: Mapping[str, Path]) -> str:
    """Upload folders of models into a repository that is there.

    Args:
        name: OWNER/NAME of the repository.
        folders: by their paths in the repository; "." is its top.

    Returns:
        the address of the repository.

    Raises:
        OutputError: one could not be uploaded; the message says how to do it by hand.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        for place, folder in folders.items():
            hub.upload_folder(
                repo_id=name, folder_path=folder, path_in_repo=place, commit_message=f"Upload {folder.name} of a run"
            )
    except Exception as error:
        by_hand = " && ".join(f"hf upload {name} {folder} {place}" for place, folder in folders.items())
        raise OutputError(
            f"output.push_to_hub: the upload to {name} failed: {shown(error)}; the models are whole on disk: {by_hand}"
        ) from error
    return f"{hub.endpoint}/{name}"
