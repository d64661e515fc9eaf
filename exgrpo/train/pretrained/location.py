"""Where a model lies: a folder, a name of this package or a name on a hub. No model library is imported here."""

from pathlib import Path

from exgrpo.train.builtin import ASSETS, PREFIX, model_names
from exgrpo.train.errors import ModelError, os_errors_as


def located(path: str) -> str:
    """The folder that a model's path means, or the hub name that it is.

    Args:
        path: a local folder, builtin:NAME for a model that ships with the package, or a hub name.

    Raises:
        ModelError: it is none of them, or the folder holds no model.
    """
    with os_errors_as(ModelError, f"policy.path: {path!r} cannot be read"):
        if path.startswith(PREFIX):
            folder = ASSETS / path.removeprefix(PREFIX)
            if not (folder / "config.json").is_file():
                known = ", ".join(model_names()) or "none"
                raise ModelError(f"policy.path: no builtin model {path!r}; there is {known}")
            return str(folder)
        if path.startswith((".", "/", "~")) or Path(path).exists():
            folder = Path(path).expanduser()
            if not (folder / "config.json").is_file():
                if (folder / "adapter_config.json").is_file():
                    way = f"name the model that they are for, and --lora.path {folder} beside it"
                    raise ModelError(f"policy.path: {folder} holds adapters and no model: {way}")
                raise ModelError(f"policy.path: {folder} holds no config.json, so no Hugging Face model")
            return str(folder)
        return path


def on_hub(path: str) -> bool:
    """Whether a model's path is a hub name. Raises ModelError as `located` does."""
    return not Path(located(path)).is_dir()
