"""Replies as tokens: what stands behind a turn is what the chat template writes there."""

import numpy as np
import pytest

from exgrpo.train.common.errors import ConfigError
from exgrpo.train.config.rollout import EnvironmentConfig
from exgrpo.train.rollout.turns.environments import encoding
from tests.tools.experience.runs import pretrained

CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer():
    import copy

    own = copy.deepcopy(pretrained().tokenizer)
    own.chat_template = CHATML
    return own


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("text", ["12 + 3", "", "no: 15"])
def test_a_conversation_is_what_the_template_writes_of_it(tokenizer, text, closed):
    encode = encoding(EnvironmentConfig(role="user"), tokenizer, (tokenizer.eos_token_id,))
    turns = [{"role": "user", "content": "What is 7 + 8?"}, {"role": "assistant", "content": "7 + 8 = 15"}]
    prompt = ids(tokenizer, tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True))
    said = [*ids(tokenizer, "7 + 8 = 15"), *([tokenizer.eos_token_id] if closed else [])]
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    assert [*prompt, *said, *encode(text, closed).tolist()] == ids(tokenizer, whole)


def test_text_stands_as_it_is(tokenizer):
    encode = encoding(EnvironmentConfig(), tokenizer, (tokenizer.eos_token_id,))
    for closed in (True, False):
        found = encode(" 15", closed)
        assert found.dtype == np.int32
        assert tokenizer.decode(found) == " 15"


def test_a_template_that_closes_an_answer_otherwise_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace("+ eos_token", "+ ', '")
    with pytest.raises(ConfigError, match=r"environment\.role: the chat template closes an answer with"):
        encoding(EnvironmentConfig(role="user"), tokenizer, (tokenizer.eos_token_id,))
    tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('two at most') }}{% endif %}x"
    with pytest.raises(ConfigError, match=r"refuses messages of tool: .*two at most"):
        encoding(EnvironmentConfig(role="tool"), tokenizer, (tokenizer.eos_token_id,))
