"""The two walks through the tokens, chunk by chunk: log-probabilities with their backward, and the policy loss.

The backward of the log-probabilities recomputes the logits of each chunk; or, since it knows the sums over rows, those
of all tokens with a slice of the vocabulary, whose gradient is complete then. The policy loss has logits, loss and both
gradient products of a chunk before the next one begins: the normaliser and the advantages are known beforehand, so a
token's coefficient is known as soon as its log-probability is. That is three products over tokens, width and
vocabulary, where recomputing the logits takes four.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from exgrpo.kernels.chunks import chunking
from exgrpo.kernels.chunks.head import Chunk, ChunkedHead, GradientSums, compact, order_of, packing, positions
from exgrpo.kernels.chunks.passes import Backend, Held, Passes, PassesOf
from exgrpo.kernels.chunks.products import MatrixGradient, unit_of
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums, Upstream, row_factors
from exgrpo.kernels.inputs import (
    LEFT_OUT,
    Fields,
    Gradients,
    Head,
    LogProb,
    Needed,
    PolicyTerms,
    PolicyTokens,
    compute_dtype,
    mapped,
)
from exgrpo.kernels.objective import sum_rows


class Part(NamedTuple):
    """Tokens of a call that are computed alike."""

    walk: ChunkedHead
    passes_of: PassesOf


def parts_of(head: Head, backend: Backend, active: Tensor | None, spare: int = 0) -> list[Part]:
    """Split the tokens of a call by how they are computed; ``active`` [T] bool have a gradient, None: all.

    ``spare``: see `ChunkedHead`.

    Where a set of allowed tokens is a small part of the vocabulary, only pairs of a token and an id of its
    set are multiplied. Where it is a large part, or where there is none, a product of matrices is faster.
    """
    options = head.options
    if options.allowed_tokens is None:
        return [Part(ChunkedHead(head, active, spare), backend.passes_of)]
    sizes = options.allowed_tokens.offsets.diff()
    taking = head.target != LEFT_OUT
    if options.counts is not None:
        order_of(taking, active, options.counts)  # which checks them
    whole, large = taking & (sizes == 0), taking & (sizes > max(1, options.shard.vocabulary // backend.ALLOWED_PART))
    of_whole, of_large, count = torch.stack((whole.sum(), large.sum(), taking.sum())).tolist()
    options = replace(options, counts=None)
    found = [
        (count - of_whole - of_large, None, options, backend.allowed_passes_of),
        (of_whole, whole, replace(options, allowed_tokens=None), backend.passes_of),
        (of_large, large, options, backend.masked_passes_of),
    ]
    parts = []
    for number, where, own, passes_of in found:
        if number:
            target = head.target
            if number < count:
                target = target.masked_fill(whole | large if where is None else ~where, LEFT_OUT)
            parts.append(Part(ChunkedHead(head._replace(target=target, options=own), active), passes_of))
    if not parts:
        return [
            Part(ChunkedHead(head._replace(options=replace(options, allowed_tokens=None)), active), backend.passes_of)
        ]
    return parts


def log_prob_forward(head: Head, backend: Backend) -> tuple[LogProb, Tensor]:
    """Log-probability and entropy of each token [T], and the statistics [4, T] that the backward wants saved."""
    found = []
    for walk, passes_of in parts_of(head, backend, None):
        passes = passes_of(walk)
        sums = head.weight.new_empty(4, walk.count, dtype=walk.dtype)
        for chunk in walk.chunks(0, walk.count, passes.chunk_rows(gradient_follows=False), passes.tile):
            found_sums, _ = passes.chunk_forward(chunk, gradient_follows=False)
            torch.stack(found_sums, out=sums[:, chunk.rows])
        statistics, result = passes.finished(Sums(*sums))
        found.append([walk.all_tokens(values) for values in (*result, torch.stack(statistics))])
    log_prob, entropy, saved = map(_together, zip(*found, strict=True))
    return LogProb(log_prob, entropy), saved


def log_prob_backward(
    head: Head,
    saved: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    needed: Needed,
    backend: Backend,
    weight_grad: Tensor | None = None,
) -> Gradients:
    """Gradients from those of the two outputs [T]; None stands for zero. Tokens without gradient are skipped.

    That of the weight is added to ``weight_grad``, if there is one, and not among the results then.
    """
    given = Upstream(torch.zeros_like(saved[0]) if grad_log_prob is None else grad_log_prob, grad_entropy)
    parts = parts_of(head, backend, given.active)
    own_upstreams = [_in_order(part.walk, given) for part in parts]
    unit = unit_of(head, *(values for upstream in own_upstreams for values in upstream))
    sums = GradientSums(head, needed, unit, weight_grad)
    for (walk, passes_of), upstream in zip(parts, own_upstreams, strict=True):
        passes = passes_of(walk)
        statistics = Statistics(*walk.of_tokens(saved.t()).t())
        upstream = upstream.times(unit)
        factors = row_factors(walk.temperature(), head.options.softcap, statistics, upstream)
        most = passes.chunk_rows(gradient_follows=True)
        columns = slice_columns(walk, passes, most) if needed.weight and len(parts) == 1 else 0
        sums.enter(walk, passes.written_once, once=len(parts) == 1 and (columns > 0 or walk.active <= most))
        if columns:
            (chunk,) = walk.chunks(0, walk.active, walk.active, passes.tile)
            own, own_factors = _some(statistics, chunk.rows), _some(factors, chunk.rows)
            del passes
            sums.add_slices(chunk, own_factors.scale, _slices(walk, passes_of, columns, chunk, own, own_factors))
            continue
        for chunk in walk.chunks(0, walk.active, most, passes.tile):
            own, own_factors = _some(statistics, chunk.rows), _some(factors, chunk.rows)
            gradient = passes.chunk_gradient(chunk, None, own, own_factors)
            sums.add(chunk, chunk.rows, gradient, own_factors.scale)
    return sums.finish()


def slice_columns(walk: ChunkedHead, passes: Passes, most: int) -> int:
    """Entries of the vocabulary of a slice, 0 if chunks of ``most`` tokens are as good.

    Each chunk reads all of the weight and its gradient anew, each slice all tokens and theirs.
    """
    size, columns = walk.shard.size, 0 if walk.active <= most else passes.slice_columns()
    if not columns:
        return 0
    chunks, slices = -(-walk.active // most), -(-size // columns)
    equal = -(-size // slices // chunking.TILE_COLUMNS) * chunking.TILE_COLUMNS
    return min(columns, equal) if slices * walk.active < chunks * size else 0


def _slices(
    walk: ChunkedHead, passes_of: PassesOf, columns: int, chunk: Chunk, statistics: Statistics, factors: Factors
) -> Iterator[tuple[slice, MatrixGradient]]:
    """Gradients of a chunk's raw products, a slice of the vocabulary at a time; the first one is the largest."""
    for start in range(0, walk.shard.size, columns):
        entries = slice(start, min(start + columns, walk.shard.size))
        part = walk.part(entries)
        own = chunk._replace(target=part.target.select(chunk.rows))
        gradient = passes_of(part).chunk_gradient(own, None, statistics, factors)
        assert isinstance(gradient, MatrixGradient)
        yield entries, gradient
        del gradient  # the next one takes its memory


def policy_loss_forward(
    head: Head, terms: PolicyTerms, needed: Needed, backend: Backend, weight_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Gradients]:
    """The loss, log-probability, entropy, ratio and clipped [4, T], and the gradients; see `log_prob_backward`."""
    everywhere = bool(terms.entropy_coef)
    active = None if everywhere else terms.tokens.advantage != 0
    # The parts of a weight may differ by rank, and chunks may not.
    alone = needed.weight and weight_grad is None and not head.options.shard.group_name
    summed = head.weight.numel() * compute_dtype(head.options.operand).itemsize
    parts = parts_of(head, backend, active, summed if alone else 0)
    normalizer = terms.normalizer
    if normalizer is None:
        count = sum(part.walk.count for part in parts)
        normalizer = head.weight.new_full((), max(1, count), dtype=torch.float64)
    own_tokens = [_in_order(part.walk, terms.tokens) for part in parts]
    unit = unit_of(head, *(tokens.advantage for tokens in own_tokens), terms.entropy_coef)
    # In a unit, the gradients are gathered without the normaliser.
    divisor, unit = (normalizer, None) if unit is None else (1 / unit, unit * normalizer)
    row_terms = RowTerms(terms.surrogate, terms.entropy_coef, divisor, head.options.softcap)
    gradients = GradientSums(head, needed, unit, weight_grad)
    losses, found = [], []
    for (walk, passes_of), tokens in zip(parts, own_tokens, strict=True):
        passes = passes_of(walk)
        most = passes.chunk_rows(gradient_follows=True)
        gradients.enter(walk, passes.written_once, once=len(parts) == 1 and walk.active <= most)
        results = _policy_results(walk, passes, tokens, row_terms, gradients, most)
        value, _, entropies, *_ = results
        losses.append(-sum_rows(value + terms.entropy_coef * entropies if everywhere else value.clone()) / normalizer)
        found.append(walk.all_tokens(results[1:5]))
    return _together(losses).to(results.dtype), _together(found), gradients.finish()


def _policy_results(
    walk: ChunkedHead, passes: Passes, tokens: PolicyTokens, terms: RowTerms, gradients: GradientSums, most: int
) -> Tensor:
    """The fields of `PolicyRows` of the tokens of a walk, [9, count]."""
    results = walk.head.weight.new_empty(len(PolicyRows._fields), walk.count, dtype=walk.dtype)
    active = walk.active if any(gradients.needed) else 0
    for start, end, with_gradient in ((0, active, True), (active, walk.count, False)):
        for chunk in walk.chunks(start, end, most, passes.tile):
            sums, held = passes.chunk_forward(
                chunk, gradient_follows=with_gradient, with_entropy=bool(terms.entropy_coef)
            )
            rows = passes.policy(sums, chunk, held, _some(tokens, chunk.rows), terms, results[:, chunk.rows])
            if with_gradient:
                upstream = Upstream(rows.coefficient, terms.entropy_upstream(rows.coefficient))
                statistics = Statistics(sums.anchor, sums.gap, sums.rest, rows.mean)
                factors = Factors(rows.scale, rows.at_target, upstream.beyond(terms.softcap))
                _add_gradients(gradients, passes, chunk, held, statistics, factors, upstream.active)
    return results


def _together(found: Sequence[Tensor]) -> Tensor:
    return sum(found[1:], found[0])


def _some(values: Fields, rows: slice | Tensor) -> Fields:
    return mapped(values, lambda one: one[rows])


def _in_order(walk: ChunkedHead, values: Fields) -> Fields:
    """Return per-token values [T] in the order of a walk, numbers in its dtype."""

    def ordered(one: Tensor) -> Tensor:
        one = walk.of_tokens(one)
        return one if one.dtype == torch.bool else one.to(walk.dtype)

    return mapped(values, ordered)


def _add_gradients(
    gradients: GradientSums,
    passes: Passes,
    chunk: Chunk,
    held: Held,
    statistics: Statistics,
    factors: Factors,
    active: Tensor,
) -> None:
    """Add the gradients of the active rows of a chunk: not of the clipped ones, if the backend takes them out."""
    kept = None if passes.block is None else positions(active)
    where: Tensor | slice = chunk.rows
    if kept is not None and passes.block is not None:
        if not kept.numel():
            return
        kept = packing(kept)
        where = kept + chunk.rows.start
        chunk, statistics, factors = chunk.select(kept), _some(statistics, kept), _some(factors, kept)
        held = compact(held, kept, passes.block)
    gradients.add(chunk, where, passes.chunk_gradient(chunk, held, statistics, factors), factors.scale)
