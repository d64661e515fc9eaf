"""What of a model's configuration has to be equal in the trainer and in a server."""

from typing import Any

NAMES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_parameters",
)


def model_facts(config: Any) -> dict[str, Any]:
    """The architecture's type, sizes and positions, of a Hugging Face configuration; those that it has."""
    text = config.get_text_config()
    return {name: getattr(text, name) for name in NAMES if hasattr(text, name)}
