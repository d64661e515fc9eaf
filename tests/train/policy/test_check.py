"""Models that are not whole: damaged by hand, each named before anything is trained, answered or served."""

import json
import shutil
import struct
from contextlib import ExitStack

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from exgrpo.tools import serve
from exgrpo.tools.evaluate.evaluation import run as run_evaluation
from exgrpo.tools.evaluate.options import EvaluationOptions
from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.errors import ConfigError, DataError, ModelError
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.data.questions import Question
from exgrpo.train.policy.check import check_dtype, check_weights
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import check_prompts, load_pretrained
from exgrpo.train.rollout.engine import training_settings
from exgrpo.train.rollout.registry import choose_engine
from tests.integrations import tiny as models
from tests.train import tiny
from tests.train.configs import configured
from tests.train.fakes import one_of_two

UP, HEAD, NORM = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"


def safetensors(folder, state):
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def sharded(folder, state):
    """Two files and an index."""
    names = sorted(state)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, of_file in parts.items():
        save_file({name: state[name] for name in of_file}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, of_file in parts.items() for name in of_file}
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder, state):
    torch.save(state, folder / "pytorch_model.bin")


def rewritten(folder, change, write=safetensors, *, tied=True):
    """A model whose weights were changed by hand."""
    tiny.save_model(folder, tied=tied)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write(folder, change(state))
    return folder


def without(name):
    return lambda state: {key: weight for key, weight in state.items() if key != name}


def with_number(value, dtype=torch.float32):
    def change(state):
        state = {name: weight.to(dtype) for name, weight in state.items()}
        state[UP][-1, -1] = value
        return state

    return change


@pytest.mark.parametrize("write", [safetensors, sharded, pickled])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), f"missing weights: {UP}$"),
        (lambda state: {"x": torch.zeros(3)}, "missing weights: .* and 18 more; .* does not have: x$"),
        (lambda state: {**state, "v_head.weight": torch.zeros(3)}, "model does not have: v_head.weight"),
        (lambda state: {**state, NORM: torch.ones(31)}, rf"of another shape: {NORM} \[31\] instead of \[32\]"),
        (with_number(float("nan")), f"NaN or infinity in {UP}$"),
        (with_number(float("inf")), f"NaN or infinity in {UP}$"),
        (with_number(float("-inf"), torch.bfloat16), f"NaN or infinity in {UP}$"),
        (with_number(float("nan"), torch.float16), f"NaN or infinity in {UP}$"),
    ],
)
def test_weights_that_are_not_whole_are_named(tmp_path, write, change, message, capfd):
    folder = rewritten(tmp_path, change, write)
    capfd.readouterr()
    with pytest.raises(ValueError, match=f"^policy.path: .* cannot be used: .*{message}"):
        check_weights(find_model(str(folder)))
    assert capfd.readouterr() == ("", "")  # the error is all that is said


@pytest.mark.parametrize("write", [safetensors, sharded, pickled])
@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (dict, False),
        (without(HEAD), True),
        (lambda state: {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, True),
        (lambda state: {name.removeprefix("model."): weight for name, weight in state.items()}, True),
        (with_number(3e38), True),
        (lambda state: {**state, HEAD: state["model.embed_tokens.weight"].clone()}, True),
    ],
    ids=["untied", "tied", "old positions", "decoder alone", "large", "tied and repeated"],
)
def test_what_transformers_understands_is_whole(tmp_path, write, change, tied):
    check_weights(find_model(str(rewritten(tmp_path, change, write, tied=tied))))


class Opened:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_weights_run_no_code(tmp_path):
    ran = tmp_path / "ran"
    folder = rewritten(tmp_path / "model", lambda state: {**state, UP: Opened(ran)}, pickled, tied=True)
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read .*: download it or save it again"):
        check_weights(find_model(str(folder)))
    assert not ran.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)[UP].close()
    assert ran.exists()  # the file would have run it


def test_files_that_cannot_be_read_are_named(tmp_path):
    folder = rewritten(tmp_path, dict, sharded)
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{second.name} cannot be read .*: download it or save it again"):
        check_weights(find_model(str(folder)))
    second.unlink()
    with pytest.raises(ValueError, match=f"{second.name} cannot be read"):
        check_weights(find_model(str(folder)))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="model.safetensors.index.json is no index of weights"):
        check_weights(find_model(str(folder)))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ValueError, match="it has no weights, neither model.safetensors, .* nor pytorch_model.bin.index"
    ):
        check_weights(find_model(str(folder)))


HUGE = 10**12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("dtype", value) for value in ("F16", "I64", "F7", 7)),
        *(("shape", value) for value in ([], [HUGE], [-1], [2**40, 2**40], "x")),
        *(("data_offsets", value) for value in ([0, 0], [0, HUGE], [-1, 4], [2**64, 2**65], None)),
        *(("length", value) for value in (0, HUGE, 2**64 - 1)),
    ],
)
def test_a_header_of_weights_that_lies_is_named(tmp_path, key, value):
    path = rewritten(tmp_path, dict) / "model.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header[UP][key] = value
    text = json.dumps(header).encode()
    length = value if key == "length" else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + content[8 + size :])
    with pytest.raises(ModelError, match=f"^policy.path: {tmp_path} cannot be used"):
        check_weights(find_model(str(tmp_path)))


@pytest.mark.parametrize("place", ["../../x.safetensors", 7, "", "\0", "config.json"])
def test_an_index_of_weights_that_lies_is_named(tmp_path, place):
    index = rewritten(tmp_path, dict, sharded) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {UP: place}}))
    with pytest.raises(ModelError, match=f"^policy.path: {tmp_path} cannot be used"):
        check_weights(find_model(str(tmp_path)))


def test_ranks_share_the_reading(tmp_path):
    bad = {UP, NORM, "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"}

    def change(state):
        return {name: weight * float("nan") if name in bad else weight for name, weight in state.items()}

    source = find_model(str(rewritten(tmp_path, change)))
    told = []
    for rank in range(2):  # the other one finds nothing
        with pytest.raises(ValueError, match="NaN or infinity"):
            check_weights(source, one_of_two(lambda value: value and (told.extend(value) or []), rank=rank))
    assert sorted(told) == sorted(bad)  # each by one of them


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "clip"}, r"\(clip\) is for more than text, see vision_config in its configuration"),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            r"\(gemma3\) is for more than text, see vision_config in its configuration",
        ),
        ({"model_type": "t5"}, r"\(t5\) has an encoder for its input"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "has the head of BertForMaskedLM"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_is_no_causal_lm_for_text_is_refused_by_name(values, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"policy.path: .* {reason}: take a causal LM for text$"):
        find_model(str(tmp_path))


@pytest.fixture
def arithmetic(tmp_path):
    """A copy of the shipped model, and a function that changes one of its JSON files."""
    folder = tmp_path / "arithmetic"
    shutil.copytree(ASSETS / "arithmetic", folder)

    def change(file, **values):
        path = folder / file
        there = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**there, **values}))

    return folder, change


@pytest.mark.parametrize("owner", ["config.json", "tokenizer_config.json"])
def test_code_in_a_models_folder_is_not_run(arithmetic, owner, tmp_path, monkeypatch):
    folder, change = arithmetic
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if owner == "config.json":
        change(owner, model_type="own", auto_map={"AutoConfig": "own.Config"})
    else:
        change(owner, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    with pytest.raises(ValueError, match="needs code of its own, and code from model folders is not run: take a model"):
        load_pretrained(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and no model has more than 1"),
        *(("config.json", {"vocab_size": size}, "^policy.path: ") for size in (0, -1, "x", None, [320], 1.5)),
        *(("config.json", {"hidden_size": size}, "^policy.path: ") for size in (0, -1, HUGE, "x", 32.5)),
        *(("config.json", {"num_attention_heads": heads}, "^policy.path: ") for heads in (0, -1, HUGE, None)),
        *(("config.json", {"rope_parameters": value}, "^policy.path: ") for value in (7, {"rope_type": "nothing"})),
        ("config.json", {"hidden_act": "nothing"}, "^policy.path: "),
        ("config.json", {"dtype": "__class__"}, "^policy.path: "),
        ("config.json", {"rms_norm_eps": []}, "^policy.path: "),
        ("config.json", {"quantization_config": {"quant_method": "nothing"}}, "^policy.path: "),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ("config.json", {"architectures": [7]}, r"names no class in its architectures, \[7\]"),
        *(
            ("generation_config.json", {"eos_token_id": end}, "EOS .* has the id (320|-1), and its vocabulary has 320")
            for end in (320, [292, 320], -1)
        ),
        ("generation_config.json", {"eos_token_id": {}}, "cannot be loaded|names the EOS token {}: an id of a token"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "cannot be loaded: TypeError"),
        ("tokenizer_config.json", {"tokenizer_class": ["x"]}, "cannot be loaded: AttributeError"),
    ],
)
def test_values_that_no_model_has_are_one_error(arithmetic, file, values, message):
    folder, change = arithmetic
    change(file, **values)
    with pytest.raises(ModelError, match=message):
        check_weights(load_pretrained(str(folder)).model)


def test_a_model_without_sdpa_names_the_option(tmp_path):
    models.model("mamba").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"policy\.attention: .* no sdpa .*: take policy\.attention eager"):
        find_model(str(tmp_path)).load(torch.float32, "sdpa")


@pytest.mark.parametrize("content", ["{", "", "[]"])
def test_a_damaged_generation_config_does_not_count_as_none(arithmetic, content):
    folder, _ = arithmetic
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_pretrained(str(folder))
    (folder / "generation_config.json").unlink()
    assert load_pretrained(str(folder)).eos == (292,)


def test_the_folder_of_a_run_is_told_from_that_of_its_model(arithmetic, tmp_path):
    shutil.copytree(arithmetic[0], tmp_path / "run" / "model")
    with pytest.raises(ModelError, match="/run holds no config.json, so no Hugging Face model: .*/run/model does"):
        load_pretrained(str(tmp_path / "run"))


def test_a_tokenizer_that_is_larger_than_the_embedding_is_named(arithmetic):
    folder, _ = arithmetic
    tokenizer = AutoTokenizer.from_pretrained(folder)
    free = 320 - len(tokenizer)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(free)])
    tokenizer.save_pretrained(folder)
    assert len(load_pretrained(str(folder)).tokenizer) == 320
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # as that of Gemma 3 in models of text
    tokenizer.save_pretrained(folder)
    loaded = load_pretrained(str(folder))
    ids = tuple(loaded.tokenizer("1 <image>")["input_ids"])
    check_prompts(loaded, [Question(0, ids[:-1], "1", "1", "mine")])
    with pytest.raises(DataError, match="'1 <image>' of 'mine' has the token <image>, which this model cannot read"):
        check_prompts(loaded, [Question(0, ids, "1 <image>", "1", "mine")])
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ValueError, match="has the token '<one more>' with the id 321, and the model's vocabulary has 320"
    ):
        load_pretrained(str(folder))
    tokenizer.pad_token = "<one more>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="the pad token of .* has the id 321"):
        load_pretrained(str(folder))


def chosen(length, path="builtin:arithmetic", overrides=None):
    config = configured({"data": {"max_prompt_tokens": 12}, "rollout": {"max_tokens": length - 12}})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "transformers"})})
    return choose_engine(training_settings(config, load_pretrained(path, overrides)), ALONE).name


def test_fp16_is_refused_where_pytorch_has_no_products_for_it():
    check_dtype("bf16", torch.device("cpu"))
    if get_accelerator().is_fp16_supported():
        check_dtype("fp16", torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match=r"policy\.dtype fp16: PyTorch has no products in fp16 for this CPU"):
            check_dtype("fp16", torch.device("cpu"))


def test_too_few_positions_are_refused_with_the_remedy(arithmetic):
    assert chosen(512) == "transformers"
    message = r"max_prompt_tokens \+ max_tokens \(12 \+ 501\) exceed the 512 positions .*max_position_embeddings=513"
    with pytest.raises(ConfigError, match=message):
        chosen(513)
    assert chosen(513, overrides={"max_position_embeddings": 513}) == "transformers"
    folder, change = arithmetic
    change("config.json", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert chosen(1024, str(folder)) == "transformers"
    with pytest.raises(ConfigError, match="exceed the 1024 positions"):
        chosen(1025, str(folder))
    change("config.json", rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ConfigError, match="exceed the 512 positions"):
        chosen(513, str(folder))


def test_evaluation_and_servers_ask_too(arithmetic, tmp_path):
    folder, _ = arithmetic
    model = LlamaForCausalLM.from_pretrained(folder)
    model.model.layers[2].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(folder)
    message = "NaN or infinity in model.layers.2.mlp.up_proj.weight"
    options = EvaluationOptions(
        model=str(folder),
        data={"test": ("builtin:arithmetic",), "test_limit": 1},
        rollout={"max_tokens": 80},
        output={"folder": tmp_path / "evaluation"},
    )
    with ExitStack() as resources, pytest.raises(ValueError, match=message):
        run_evaluation(options, ALONE, resources)
    assert not options.output.folder.exists()
    with pytest.raises(ValueError, match=message):
        serve.build([str(folder)], on_cpu=True)
    with pytest.raises(ValueError, match=r"--max-tokens \(513\) exceed the 512 positions"):
        serve.build(["builtin:arithmetic", "--max-tokens=513"], on_cpu=True)
