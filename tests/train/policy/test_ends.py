"""With which tokens answers end: what a model names, stop strings of one token, and the end of the chat template."""

import dataclasses
import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from exgrpo.train.common.distributed import ALONE
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.config.objective import ObjectiveConfig
from exgrpo.train.policy.policy import Policy
from exgrpo.train.policy.source import find_model
from exgrpo.train.policy.tokenizer import load_pretrained, missing_end
from tests.train import tiny

END, PAD = 292, 293
"""Tokens of the shipped model for arithmetic: <|end|>, its end of sequence, and <|pad|>."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def arithmetic(tmp_path):
    """A copy of the shipped model."""
    return shutil.copytree(ASSETS / "arithmetic", tmp_path / "arithmetic")


def with_template(folder, template, *special):
    """The model with a chat template, and with further special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_pretrained(str(folder))


def with_another_end(folder):
    """The model with another end of sequence than the one that it writes, and that its template has."""
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": PAD}))
    settings = folder / "tokenizer_config.json"
    text = settings.read_text().replace('"eos_token": "<|end|>"', '"eos_token": "<|pad|>"')
    settings.write_text(text.replace("{{ eos_token }}", "<|end|>"))
    return folder


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"), [(2, None, (2,)), ([5, 2], None, (5, 2)), (2, [6, 5], (6, 5))]
)
def test_every_eos_token_is_found_and_that_of_the_tokenizer_comes_first(tmp_path, config_eos, generation_eos, expected):
    tiny.save_model(tmp_path, tied=True)
    for name, eos in (("config.json", config_eos), ("generation_config.json", generation_eos)):
        path = tmp_path / name
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "eos_token_id": eos, "vocab_size": 320}))
    if generation_eos is None:
        (tmp_path / "generation_config.json").unlink()
    else:
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == generation_eos
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "arithmetic")
    tokenizer.save_pretrained(tmp_path)
    assert load_pretrained(str(tmp_path)).eos == (tokenizer.eos_token_id, *expected)


def test_adapters_bring_the_ends_of_the_run_that_has_trained_them(arithmetic, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    assert load_pretrained(str(arithmetic), adapters=str(adapters)).eos == (END,)
    GenerationConfig(eos_token_id=[END, 7]).save_pretrained(adapters)
    assert load_pretrained(str(arithmetic), adapters=str(adapters)).eos == (END, 7)


def test_a_stop_string_of_one_token_is_an_end(arithmetic):
    model = with_template(arithmetic, CHATML, "<|im_end|>")
    (im_end,) = model.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    (line,) = model.tokenizer("\n")["input_ids"]
    assert model.ends(()) == [END]
    assert model.ends(("<|im_end|>", "\n", "two words", "<|end|>", "\n")) == [END, im_end, line]


def test_a_space_that_a_tokenizer_puts_before_a_text_is_no_part_of_a_stop_string(arithmetic):
    pieces = Tokenizer(models.BPE({"▁": 0, "\n": 1, "a": 2}, merges=[]))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = dataclasses.replace(
        load_pretrained(str(arithmetic)), tokenizer=PreTrainedTokenizerFast(tokenizer_object=pieces)
    )
    assert model.tokenizer("\n")["input_ids"] == [0, 1]
    assert model.ends(("\n", "aa")) == [END, 1]


@pytest.mark.parametrize(
    ("template", "special", "stop", "expected"),
    [
        (CHATML, ("<|im_end|>",), (), "<|im_end|>"),
        (CHATML, ("<|im_end|>",), ("<|im_end|>",), None),
        (CHATML, ("<|im_end|>",), ("\n",), None),  # rollouts end one token later
        (CHATML, (), (), "<|im_end|>"),  # a tokenizer that has no such token writes it in several
        (CHATML, (), ("<|im_end|>",), None),
        (CHATML.replace("<|im_end|>", " <|end|>"), (), (), None),
        (CHATML.replace("<|im_end|>", "<|im_end|><|end|>"), ("<|im_end|>",), (), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "\n"), (), (), None),
        ("{{ raise_exception('roles must alternate') }}", (), (), None),
    ],
)
def test_the_end_of_a_chat_template_that_ends_no_rollout_is_found(arithmetic, template, special, stop, expected):
    assert missing_end(with_template(arithmetic, template, *special), stop) == expected


def test_no_shipped_model_lacks_the_end_of_its_template():
    for folder in sorted(ASSETS.glob("*/config.json")):
        assert missing_end(load_pretrained(str(folder.parent)), ()) is None, folder


@pytest.mark.parametrize(
    "lora", [{}, {"rank": 2}, {"rank": 2, "result": "merged"}], ids=["whole", "adapters", "merged"]
)
@pytest.mark.parametrize(("ids", "expected"), [([2, 5], [2, 5]), ([5], 5)])
def test_a_saved_model_has_the_ends_of_the_run_and_its_other_settings(tmp_path, lora, ids, expected):
    """Also those that transformers warns of and does not save itself: a temperature where nothing is sampled."""
    if lora:
        pytest.importorskip("peft", reason="peft is not installed")
    source, saved = tmp_path / "source", tmp_path / "saved"
    tiny.save_model(source, tied=True)
    settings = {"eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6, "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps(settings))
    policy = Policy(tiny.config(source, ObjectiveConfig(), lora=lora), find_model(str(source)), ALONE)
    policy.end_with(ids)
    policy.save(saved)
    assert (
        GenerationConfig.from_pretrained(saved).to_diff_dict().items() >= {**settings, "eos_token_id": expected}.items()
    )
