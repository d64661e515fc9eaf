"""Log-probabilities and entropies by chunks; the backward recomputes each chunk's logits."""

import torch
from torch import Tensor

from exgrpo.kernels.inputs import Gradients, Head, Needed
from exgrpo.kernels.results import LogProb
from exgrpo.kernels.torch_chunks.head import ChunkedHead, GradientSums, positions
from exgrpo.kernels.torch_chunks.rows import RowOperations
from exgrpo.kernels.torch_chunks.softmax import RowGradient, Statistics


def log_prob_forward(head: Head, operations: type[RowOperations]) -> tuple[LogProb, tuple[Tensor, ...]]:
    """Log-probability and entropy of each token [T], and the statistics that the backward wants saved."""
    chunked = ChunkedHead(head, operations())
    parts = [chunked.operations.statistics(chunked, chunk, gradient_follows=False) for chunk in chunked.chunks()]
    if not parts:
        parts = [Statistics(*head.weight.new_empty(4, 0, dtype=chunked.dtype))]
    statistics = Statistics(*(torch.cat(values) for values in zip(*parts, strict=True)))
    result = LogProb(chunked.all_tokens(statistics.log_prob), chunked.all_tokens(statistics.entropy))
    return result, tuple(statistics)


def log_prob_backward(
    head: Head,
    saved: tuple[Tensor, ...],
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    needed: Needed,
    operations: type[RowOperations],
) -> Gradients:
    """Gradients from those of the two outputs [T]; None stands for zero. Tokens without gradient are skipped."""
    chunked = ChunkedHead(head, operations())
    statistics = Statistics(*saved)
    log_prob = torch.zeros_like(statistics.gap) if grad_log_prob is None else chunked.token_values(grad_log_prob)
    entropy = None if grad_entropy is None else chunked.token_values(grad_entropy)
    upstream = RowGradient(log_prob, entropy)
    sums = GradientSums(chunked, needed)
    among = positions(upstream.active)
    for chunk in chunked.chunks(among):
        tokens = chunk.rows if among is None else among[chunk.rows]
        own = statistics.select(tokens)
        chunked.operations.recall(chunked, chunk, own)
        sums.add(chunk, own, upstream.select(tokens), tokens)
    gradients = sums.finish()
    hidden = None if gradients.hidden is None else chunked.all_tokens(gradients.hidden.to(head.hidden.dtype))
    return gradients._replace(hidden=hidden)
