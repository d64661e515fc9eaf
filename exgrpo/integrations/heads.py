"""The public names of :mod:`exgrpo.heads.inputs`, for code of one's own on the kernels."""

from exgrpo.heads.inputs import HeadInputs, VocabShardInputs, head_inputs, vocab_shard

__all__ = ["HeadInputs", "VocabShardInputs", "head_inputs", "vocab_shard"]
