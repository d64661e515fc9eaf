"""Hostile model folders: a tiny sound one, of which a file is damaged or contradicts another."""

import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import sampled_from as of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from exgrpo.train.common.functions import ASSETS, DEFAULT_TASK
from exgrpo.train.policy.check import check_weights
from exgrpo.train.policy.tokenizer import load_pretrained
from tests.hostile.judge import Trial
from tests.hostile.values import ANY, Draw, Way, damaged, some

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
JSON_FILES = (CONFIG, TOKENIZER, "tokenizer_config.json", "generation_config.json")
HUGE = 10**12
WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (0, -1, 319, 321, HUGE, "320", None, [320], 1.5, {}),
    "hidden_size": (0, -1, 31, 64, HUGE, "32", None, [32], 32.5),
    "intermediate_size": (0, -1, 63, HUGE, "64", None),
    "num_hidden_layers": (0, -1, 1, 3, 10**6, HUGE, "2", None, 2.5),
    "num_attention_heads": (0, -1, 3, 8, HUGE, "4", None),
    "num_key_value_heads": (0, -1, 3, HUGE, "2"),
    "head_dim": (0, -1, 7, 16, HUGE, "8"),
    "model_type": ("", "nothing", 7, None, [], "bert", "t5", "clip", "\x1b[2J", "x" * 100_000),
    "architectures": (["Nothing"], ["BertForMaskedLM"], ["T5ForConditionalGeneration"], "x", 7, [7]),
    "hidden_act": ("nothing", 7, "", []),
    "dtype": ("float7", 7, "", [], "__class__"),
    "rope_parameters": (7, "x", [], {"rope_type": "nothing"}, {"rope_theta": "x", "rope_type": "default"}),
    "eos_token_id": (-1, 320, HUGE, "2", 1.5, [HUGE], {}, [[]]),
    "rms_norm_eps": ("x", [], {}),
    "quantization_config": ({"quant_method": "nothing"}, {"quant_method": "gptq", "bits": 4}, {}, 7, "x"),
    "auto_map": ({"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}, 7, []),
}
"""Values of a configuration that do not fit the weights and the tokenizer, or nothing."""
NO_JSON = (b"", b"{", b"[]", b"7", b"null", b'"x"', b"\x00", b"\xff\xfe", b"{" * 10**5, b"[" * 10**5, b'{"a": NaN')
SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@functools.cache
def sound() -> Path:
    """A model that is made once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="hostile_model_"))
    for path in (ASSETS / DEFAULT_TASK).iterdir():
        if path.name not in (CONFIG, WEIGHTS, "recipe.yaml", "README.md"):
            shutil.copy(path, folder)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, bos_token_id=291, eos_token_id=292, pad_token_id=293)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The model of a folder, checked and loaded as a run does, and used."""
    pretrained = load_pretrained(str(folder))
    check_weights(pretrained.model)
    model = pretrained.model.load(torch.float32, "sdpa")
    ids = torch.tensor([pretrained.tokenizer("1 + 1?")["input_ids"]])
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    return model


def other_than_files(model: torch.nn.Module, folder: Path) -> str:
    """What is wrong with a model that was loaded: its weights are those of the file."""
    own, stored = model.state_dict(), load_file(folder / WEIGHTS)
    other = [name for name, weight in stored.items() if not torch.equal(own[name], weight.float())]
    return f"other weights than the file's: {other[:3]}" if other else ""


def trial(what: str, folder: Path, **expected: Any) -> Trial:
    """One folder; `expected` is that of the `Trial`."""
    wrong = lambda model: other_than_files(model, folder)  # noqa: E731
    return Trial(what, lambda: load(folder), **{"names": (str(folder),), "wrong": wrong, **expected})


def change(folder: Path, file: str, **values: Any) -> None:
    """Change values of a file of JSON."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))


def _sound(draw: Draw, folder: Path) -> Trial:
    content = list(json.loads((folder / CONFIG).read_text()).items())
    more = draw(of(({}, {"something_of_ones_own": 0}, {"use_cache": False}, {"max_position_embeddings": 64})))
    (folder / CONFIG).write_text(json.dumps(dict(draw(st.permutations(content))) | more))
    (folder / "notes.txt").write_bytes(b"\xff")
    return trial("sound", folder, expected="right")


def _config(draw: Draw, folder: Path) -> Trial:
    key = draw(of(sorted(WRONG_VALUES)))
    change(folder, CONFIG, **{key: draw(of(WRONG_VALUES[key]))})
    return trial(f"config: {key}", folder)


def _shape(draw: Draw, folder: Path) -> Trial:
    """Sizes that contradict the weights."""
    key = draw(of(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")))
    old = SIZES[key]
    change(folder, CONFIG, **{key: draw(of((old * 2, old + 1, max(1, old // 2))))})
    return trial("other sizes", folder, expected="refused")


def _no_file(draw: Draw, folder: Path) -> Trial:
    """A file that is missing, cut or of another kind."""
    file = draw(of((WEIGHTS, WEIGHTS, *JSON_FILES)))
    content = (folder / file).read_bytes()
    if file in JSON_FILES:
        (folder / file).write_bytes(draw(of(NO_JSON)))
    elif draw(st.booleans()):
        (folder / file).write_bytes(content[: some(draw, 0, len(content) - 1)])
    else:
        (folder / file).unlink()
    return trial(f"no {file}", folder, expected="refused")


def _any_json(draw: Draw, folder: Path) -> Trial:
    file = draw(of(JSON_FILES))
    content = (folder / file).read_bytes()
    if draw(st.booleans()):
        (folder / file).write_bytes(damaged(draw, content))
        return trial(f"damaged {file}", folder)
    change(folder, file, **{draw(of(sorted(json.loads(content)))): draw(ANY)})
    return trial(f"any value in {file}", folder)


def _damaged_weights(draw: Draw, folder: Path) -> Trial:
    content = (folder / WEIGHTS).read_bytes()
    head = 8 + struct.unpack("<Q", content[:8])[0]
    whole = draw(of((head, head, len(content))))
    (folder / WEIGHTS).write_bytes(damaged(draw, content[:whole]) + content[whole:])
    return trial("damaged weights", folder)


def _header(draw: Draw, folder: Path) -> Trial:
    """A header that promises what is not there."""
    content = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    entry = header[draw(of([name for name in header if name != "__metadata__"]))]
    begin, end = entry["data_offsets"]
    bad: dict[str, tuple[Any, ...]] = {
        "dtype": ("F16", "I64", "BOOL", "F7", 7, None),
        "shape": ([], [HUGE], [-1], [2**40, 2**40], "x", [entry["shape"][0] + 1], None),
        "data_offsets": ([0, 0], [end, begin], [0, HUGE], [-1, end], [begin, end + 4], [2**64, 2**65], "x", None),
    }
    key = draw(of(sorted(bad)))
    entry[key] = draw(of(bad[key]))
    text = json.dumps(header).encode()
    length = draw(of((len(text),) * 8 + (2**63, 2**64 - 1, 0, 10**9)))
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + text + content[8 + size :])
    return trial("a header that lies", folder, expected="refused")


def _weights(draw: Draw, folder: Path) -> Trial:
    """Weights of which one is missing, left over, of another shape or not finite."""
    state = load_file(folder / WEIGHTS)
    name = draw(of(sorted(state)))
    match some(draw, 0, 5):
        case 0:
            del state[name]
        case 1:
            state[f"{name}.more"] = torch.zeros(3)
        case 2:
            state[name] = state[name][:-1].clone()
        case 3:
            state[name].view(-1)[some(draw, 0, state[name].numel() - 1)] = draw(of((float("nan"), float("inf"))))
        case 4:
            state[draw(of(("\x1b[2J", "é" * 1000, " ")))] = state.pop(name)
        case _:
            state = {}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    return trial("other weights", folder, expected="refused")


def _index(draw: Draw, folder: Path) -> Trial:
    """An index of weights in several files."""
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    places = ("../../x.safetensors", 7, "", "\x00", CONFIG)
    bad: Any = [dict.fromkeys(state, place) for place in places]
    bad += [None, [], {}, 7, dict.fromkeys(state, "part.safetensors") | {"x": "none.safetensors"}]
    of_weights = draw(of(bad))
    index: Any = draw(of(({"metadata": {}, "weight_map": of_weights}, {"weight_map": of_weights}, of_weights)))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return trial("an index that lies", folder, expected="refused")


def copied(way: Way) -> Way:
    """A way that begins with a copy of the sound model in the folder."""
    return lambda draw, folder: way(draw, shutil.copytree(sound(), folder / "model"))


WAYS = tuple(
    map(
        copied,
        (*(_config, _any_json, _no_file, _damaged_weights, _header, _weights) * 3, _sound, _shape, _index),
    )
)
