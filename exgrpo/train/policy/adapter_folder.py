"""A folder of adapters as peft saves them: what its adapter_config.json says of a run that begins with them.

Neither torch nor peft is imported here.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exgrpo.train import plain
from exgrpo.train.errors import ConfigError, os_errors_as, shown
from exgrpo.train.policy.settings import LoraConfig
from exgrpo.train.section import explain

FILE = "adapter_config.json"
HEAD = "lm_head"
"""What most models call their head."""


def with_saved(options: LoraConfig) -> LoraConfig:
    """The options of adapters with the rank, the alpha and the layers of those in `path`, if there is one.

    Raises:
        ConfigError: there are no such adapters, they are of another kind, or an option says something else.
    """
    if options.path is None:
        return options
    saved = adapter_config(options.path)
    if saved.get("peft_type") != "LORA":
        raise ConfigError(f"lora.path: {options.path} is of the kind {shown(saved.get('peft_type'))}, not LORA")
    layers = saved.get("target_modules")
    if not (isinstance(layers, list) and layers and all(isinstance(layer, str) for layer in layers)):
        raise ConfigError(
            f"lora.path: target_modules in {options.path}/{FILE} is {shown(layers)}: list the names of the layers there"
        )
    head = HEAD in layers and len(layers) > 1
    found = {
        "rank": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "targets": sorted({layer for layer in layers if not (head and layer == HEAD)}),
        "head": head,
    }
    try:
        settled = LoraConfig.model_validate({**options.model_dump(), **found})
    except ValidationError as error:
        raise ConfigError(explain(error, LoraConfig, f"{options.path}/{FILE}")) from None
    for name in found:
        stated, own = getattr(options, name), getattr(settled, name)
        same = set(stated) == set(own) if name == "targets" else stated == own
        if not same and stated != LoraConfig.model_fields[name].default:
            raise ConfigError(
                f"lora.{name} is {shown(stated)}, and that of the adapters in lora.path {options.path} is "
                f"{shown(own)}: leave lora.{name} out"
            )
    return settled


def adapter_config(folder: str) -> dict[str, Any]:
    """What peft has written about the adapters in a folder.

    Raises:
        ConfigError: it holds none, or the file is damaged.
    """
    file = Path(folder).expanduser() / FILE
    with os_errors_as(ConfigError, f"lora.path: {folder} cannot be read"):
        if not file.is_file():
            raise ConfigError(
                f"lora.path: {folder} is no folder with an {FILE}, as peft saves adapters; `hf download` fetches those "
                "of the hub into a folder"
            )
        content = file.read_bytes()
    try:
        saved = plain.parse_json(content)
    except ValueError as error:
        raise ConfigError(f"lora.path: {file} is damaged: {shown(error)}") from None
    if not isinstance(saved, dict):
        raise ConfigError(f"lora.path: {file} is damaged: it holds no mapping")
    return saved
