"""Tiny random causal LMs of many architectures, with weights large enough that their logits differ."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 67
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NARROW_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2}
MOE = {"num_experts_per_tok": 2, "output_router_logits": True, "experts_implementation": "eager"}
LATENT = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 8)
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},  # tied, softcap
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "cohere": {"logit_scale": 0.3},  # tied, multiplied
    "granite": {"logits_scaling": 4.0},  # divided
    "falcon_h1": {**MAMBA, "lm_head_multiplier": 0.5},
    "minicpm3": {**LATENT, "num_key_value_heads": 4, "dim_model_base": 8},  # hidden states divided before the head
    "nanochat": {},  # softcap 15
    "phi": {},  # bias
    "gptj": {**NARROW_GPT, "rotary_dim": 8},  # bias
    "gpt2": NARROW_GPT,
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "mistral": {},
    "olmo2": {},
    "mixtral": {**MOE, "num_local_experts": 4},  # a router's loss
    "qwen3_moe": {**MOE, "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "jetmoe": {**MOE, "num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2},  # its own name of the weight
    "mamba": {},  # logits in float32, whatever the model's dtype
    "bert": {"is_decoder": True},  # the head is deep inside, with a bias
}
FLOAT32_LOGITS = ("mamba",)


def model(name: str, scale: float = 0.1) -> torch.nn.Module:
    """Return a model of `ARCHITECTURES` in float32, without dropout."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **ARCHITECTURES[name]})
    built = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return built


def batch() -> dict[str, torch.Tensor]:
    """Two rows of 12 tokens; the first five of a row are a prompt, the last three of the other are left out."""
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    labels[1, -3:] = -100
    return {"input_ids": tokens, "labels": labels}
