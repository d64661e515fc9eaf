"""The two walks through the tokens, chunk by chunk: log-probabilities with their backward, and the policy loss.

The backward of the log-probabilities recomputes each chunk's logits. The policy loss has logits, loss and both gradient
products of a chunk before the next one begins: the normaliser and the advantages are known beforehand, so a token's
coefficient is known as soon as its log-probability is. That is three products over tokens, width and vocabulary, where
recomputing the logits takes four.
"""

import torch
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead, GradientSums, packing, positions
from exgrpo.kernels.chunks.passes import Passes, PassesOf
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums, Upstream, row_factors
from exgrpo.kernels.inputs import Gradients, Head, LogProb, Needed, PolicyTerms, PolicyTokens


def log_prob_forward(head: Head, passes_of: PassesOf) -> tuple[LogProb, Tensor]:
    """Log-probability and entropy of each token [T], and the statistics [4, T] that the backward wants saved."""
    walk = ChunkedHead(head)
    passes = passes_of(walk)
    statistics = head.weight.new_empty(4, walk.count, dtype=walk.dtype)
    results = head.weight.new_empty(2, walk.count, dtype=walk.dtype)
    for chunk in walk.chunks(0, walk.count, passes.chunk_rows(gradient_follows=False), passes.tile):
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
    most = passes.chunk_rows(gradient_follows=True)
    sums = GradientSums(walk, needed, passes.products, once=walk.active <= most, unit=unit)
    for chunk in walk.chunks(0, walk.active, most, passes.tile):
        own = statistics.select(chunk.rows)
        own_upstream = upstream.select(chunk.rows)
        factors = row_factors(chunk.temperature, head.options.softcap, own, own_upstream)
        passes.recall(chunk, own)
        sums.add(chunk, chunk.rows, passes.gradient(chunk, own, factors), factors.scale)
    return sums.finish()


def policy_loss_forward(
    head: Head, terms: PolicyTerms, needed: Needed, passes_of: PassesOf
) -> tuple[Tensor, Tensor, Gradients]:
    """The loss, log-probability, entropy, ratio and clipped [4, T], and the gradients."""
    everywhere = bool(terms.entropy_coef)
    walk = ChunkedHead(head, None if everywhere else terms.tokens.advantage != 0)
    passes = passes_of(walk)
    normalizer = terms.normalizer
    if normalizer is None:
        normalizer = head.weight.new_full((), max(1, walk.count), dtype=torch.float64)
    tokens = _in_order(walk, terms.tokens)
    unit = passes.products.unit(tokens.advantage, terms.entropy_coef)
    # In a unit, the gradients are gathered without the normaliser.
    divisor, unit = (normalizer, None) if unit is None else (1 / unit, unit * normalizer)
    row_terms = RowTerms(terms.surrogate, terms.entropy_coef, divisor, head.options.softcap)
    most = passes.chunk_rows(gradient_follows=True)
    gradients = GradientSums(walk, needed, passes.products, once=walk.active <= most, unit=unit)
    results = head.weight.new_empty(5, walk.count, dtype=walk.dtype)
    active = walk.active if any(needed) else 0
    for start, end, with_gradient in ((0, active, True), (active, walk.count, False)):
        for chunk in walk.chunks(start, end, most, passes.tile):
            sums = passes.sums(chunk, gradient_follows=with_gradient, with_entropy=everywhere)
            rows = passes.policy(sums, chunk, tokens.select(chunk.rows), row_terms)
            torch.stack(rows[:5], out=results[:, chunk.rows])
            if with_gradient:
                upstream = Upstream(rows.coefficient, row_terms.entropy_upstream(rows.coefficient))
                _add_gradients(gradients, passes, chunk, sums, rows, upstream)
    value, _, entropies, *_ = results
    loss = -(value.sum() + terms.entropy_coef * entropies.sum()) / normalizer
    return loss.to(walk.dtype), walk.all_tokens(results[1:]), gradients.finish()


def _in_order(walk: ChunkedHead, tokens: PolicyTokens) -> PolicyTokens:
    """The walk's tokens, in its order and dtype."""
    return PolicyTokens(
        walk.of_tokens(tokens.old_log_prob).to(walk.dtype),
        walk.of_tokens(tokens.advantage).to(walk.dtype),
        None if tokens.replayed is None else walk.of_tokens(tokens.replayed),
    )


def _add_gradients(
    gradients: GradientSums, passes: Passes, chunk: Chunk, sums: Sums, rows: PolicyRows, upstream: Upstream
) -> None:
    """Adds those tokens of a chunk that have a gradient: not the clipped ones, where the backend takes them out."""
    statistics = Statistics(sums.anchor, sums.gap, sums.rest, rows.mean)
    factors = Factors(rows.scale, rows.at_target, upstream.beyond(gradients.head.options.softcap))
    kept = positions(upstream.active) if passes.compacts else None
    where: Tensor | slice = chunk.rows
    if kept is not None:
        if not kept.numel():
            return
        kept = packing(kept)
        where = kept + chunk.rows.start
        chunk, statistics, factors = chunk.select(kept), statistics.select(kept), factors.select(kept)
        passes.select(kept)
    gradients.add(chunk, where, passes.gradient(chunk, statistics, factors), factors.scale)
