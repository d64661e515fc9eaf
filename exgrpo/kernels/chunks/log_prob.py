"""Log-probabilities and entropies by chunks; the backward recomputes each chunk's logits."""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.head import ChunkedHead, GradientSums
from exgrpo.kernels.chunks.passes import PassesOf
from exgrpo.kernels.chunks.softmax import Statistics, Upstream, row_factors
from exgrpo.kernels.inputs import Gradients, Head, Needed
from exgrpo.kernels.results import LogProb


def log_prob_forward(head: Head, passes_of: PassesOf) -> tuple[LogProb, Tensor]:
    """Log-probability and entropy of each token [T], and the statistics [4, T] that the backward wants saved."""
    walk = ChunkedHead(head)
    passes = passes_of(walk)
    statistics = head.weight.new_empty(4, walk.count, dtype=walk.dtype)
    results = head.weight.new_empty(2, walk.count, dtype=walk.dtype)
    for chunk in walk.chunks(0, walk.count, passes.chunk_rows()):
        found, result = passes.finished(passes.sums(chunk, gradient_follows=False))
        torch.stack(tuple(found), out=statistics[:, chunk.rows])
        torch.stack(tuple(result), out=results[:, chunk.rows])
    return LogProb(*(walk.all_tokens(values) for values in results)), walk.all_tokens(statistics)


def log_prob_backward(
    head: Head,
    saved: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    needed: Needed,
    passes_of: PassesOf,
) -> Gradients:
    """Gradients from those of the two outputs [T]; None stands for zero. Tokens without gradient are skipped."""
    upstream = Upstream(torch.zeros_like(saved[0]) if grad_log_prob is None else grad_log_prob, grad_entropy)
    walk = ChunkedHead(head, upstream.active)
    passes = passes_of(walk)
    statistics = Statistics(*walk.of_tokens(saved.t()).t())
    log_prob = walk.of_tokens(upstream.log_prob).to(walk.dtype)
    entropy = None if grad_entropy is None else walk.of_tokens(grad_entropy).to(walk.dtype)
    unit = passes.products.unit(log_prob, entropy)
    upstream = Upstream(log_prob, entropy).times(unit)
    sums = GradientSums(walk, needed, passes.products, once=walk.active <= passes.chunk_rows(), unit=unit)
    for chunk in walk.chunks(0, walk.active, passes.chunk_rows()):
        own = statistics.select(chunk.rows)
        own_upstream = upstream.select(chunk.rows)
        factors = row_factors(chunk.temperature, head.options.softcap, own, own_upstream)
        passes.recall(chunk, own)
        sums.add(chunk, chunk.rows, passes.gradient(chunk, own, factors), factors.scale)
    return sums.finish()
