"""A task for verl's command: a model of a few weights, sums as questions, and a reward."""

from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<s>", "</s>", "<unk>", " ", *"0123456789", "+", "="]
CHAT = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return {reward}
"""


def write_task(folder: Path, reward: str, copies: int = 1) -> Path:
    """The files model/, questions.parquet and reward.py in a folder, which is made; a row's index is its copy.

    `reward` is an expression of `solution_str`, a number or a dict with a score.
    """
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    whole.chat_template = CHAT
    whole.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=2, max_position_embeddings=256, **shape, **ids)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = []
    for copy, a, b in product(range(copies), range(4), range(2)):
        asked = {"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+{b}="}]}
        solved = {"style": "rule", "ground_truth": str(a + b)}
        rows.append({**asked, "reward_model": solved, "extra_info": {"index": copy}})
    pq.write_table(pa.Table.from_pylist(rows), folder / "questions.parquet")
    (folder / "reward.py").write_text(REWARD.format(reward=reward))
    return folder
