"""Arguments of the kernels from a language-model head: plain, adapted or sharded."""

from exgrpo.heads.inputs import HeadInputs, VocabShardInputs, head_inputs, vocab_shard

__all__ = ["HeadInputs", "VocabShardInputs", "head_inputs", "vocab_shard"]
