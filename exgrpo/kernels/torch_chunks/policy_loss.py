"""The policy loss by chunks: logits, loss and both gradient products of a chunk before the next one begins.

The normaliser and the advantages are known beforehand, so a token's coefficient is known as soon as its
log-probability is: three products over tokens, width and vocabulary, where recomputing the logits takes four.
"""

import torch
from torch import Tensor

from exgrpo.kernels.inputs import Gradients, Head, Needed, PolicyTerms
from exgrpo.kernels.objective import policy_objective
from exgrpo.kernels.results import PolicyLoss
from exgrpo.kernels.torch_chunks.head import Chunk, ChunkedHead, GradientSums, positions, spread
from exgrpo.kernels.torch_chunks.rows import RowOperations
from exgrpo.kernels.torch_chunks.softmax import RowGradient, Statistics, compact


def policy_loss_forward(
    head: Head, terms: PolicyTerms, needed: Needed, operations: type[RowOperations]
) -> tuple[PolicyLoss, tuple[Tensor | None, ...]]:
    """The loss, the per-token results [T], and what the backward wants saved: the gradients themselves."""
    chunked = ChunkedHead(head, operations())
    old_log_prob, advantage = chunked.token_values(terms.old_log_prob), chunked.token_values(terms.advantage)
    replayed = terms.replayed
    if replayed is not None and chunked.index is not None:
        replayed = replayed[chunked.index]
    normalizer = max(1, chunked.count) if terms.normalizer is None else terms.normalizer
    sums = GradientSums(chunked, needed)
    results = head.weight.new_zeros(5, chunked.count, dtype=chunked.dtype)
    for among, with_gradient in _parts(chunked, advantage, terms, any(needed)):
        for chunk in chunked.chunks(among):
            tokens = chunk.rows if among is None else among[chunk.rows]
            statistics = chunked.operations.statistics(
                chunked, chunk, gradient_follows=with_gradient and not terms.entropy_coef
            )
            log_prob = statistics.log_prob
            objective = policy_objective(
                log_prob,
                old_log_prob[tokens],
                advantage[tokens],
                None if replayed is None else replayed[tokens],
                terms.clip,
                terms.beta,
            )
            columns = (objective.value, log_prob, statistics.entropy, objective.ratio, objective.clipped)
            for row, column in zip(results, columns, strict=True):
                row[tokens] = column.to(row.dtype)
            if with_gradient:
                entropy = None
                if terms.entropy_coef:
                    entropy = torch.full_like(log_prob, -terms.entropy_coef) / normalizer
                upstream = RowGradient(-objective.coefficient / normalizer, entropy)
                _add_gradients(sums, chunk, statistics, upstream, tokens)
    value, log_prob, entropies, ratio, clipped = results
    loss = -(value.sum() + terms.entropy_coef * entropies.sum()) / normalizer
    per_token = (chunked.all_tokens(values) for values in (log_prob, entropies, ratio, clipped))
    return PolicyLoss(loss.to(chunked.dtype), *per_token), (chunked.index, *sums.finish())


def policy_loss_backward(
    saved: tuple[Tensor | None, ...], grad_loss: Tensor, tokens: int, dtype: torch.dtype
) -> Gradients:
    """The saved gradients times the upstream gradient of the loss; that of hidden is [tokens, D] in ``dtype``."""
    index, *gradients = saved
    hidden, weight, bias = (None if value is None else value * grad_loss for value in gradients)
    if hidden is not None:
        hidden = hidden.to(dtype)
        if index is not None:
            hidden = spread(hidden, index, tokens)
    return Gradients(hidden, weight, bias)


def _parts(
    chunked: ChunkedHead, advantage: Tensor, terms: PolicyTerms, needed: bool
) -> list[tuple[Tensor | None, bool]]:
    """The tokens [count] in parts (None: all), and whether a part has gradients.

    Where rows without a gradient stay in their chunk, tokens whose advantage is 0 get chunks of their own.
    """
    if not needed or terms.entropy_coef or chunked.operations.compacts:
        return [(None, needed)]
    active = positions(advantage != 0)
    return [(None, True)] if active is None else [(active, True), ((advantage == 0).nonzero().squeeze(1), False)]


def _add_gradients(
    sums: GradientSums, chunk: Chunk, statistics: Statistics, upstream: RowGradient, tokens: Tensor | slice
) -> None:
    """Adds those tokens of a chunk that have a gradient: not the clipped ones, nor those without advantage."""
    kept = positions(upstream.active) if sums.head.operations.compacts else None
    if kept is None:
        sums.add(chunk, statistics, upstream, tokens)
    elif kept.numel():
        exponential = compact(chunk.logits, kept)
        rows = kept + chunk.rows.start
        sums.add(chunk.select(kept, exponential), statistics.select(kept), upstream.select(kept), rows)
