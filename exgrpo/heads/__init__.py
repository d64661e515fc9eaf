"""What stands behind a head: the arguments of the kernels from it, for code of one's own."""

from exgrpo.heads.inputs import HeadInputs, VocabShardInputs, head_inputs, vocab_shard

__all__ = ["HeadInputs", "VocabShardInputs", "head_inputs", "vocab_shard"]
