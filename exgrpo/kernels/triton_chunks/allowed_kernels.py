"""Triton kernels over allowed tokens. A pair is a token of a chunk and an id of its set; each entry of a result
is written by one program, which adds up in a fixed order.

z is a logit, y the target, a the row's anchor, d = (z - a) / tau. ``bias``, ``cap`` [1] and ``temperature`` are None
where there are none.
"""

import triton
import triton.language as tl

from exgrpo.kernels.triton_chunks.row_kernels import UNDERFLOWN, capped


@triton.jit
def pairs_kernel(
    ids,  # [M] int32, over the whole vocabulary
    starts,  # [rows] int64, where each row's set begins among them
    bounds,  # [rows + 1] int64: a row has the pairs [bounds[row], bounds[row + 1])
    rows,  # [P] int32, result: the row of each pair
    words,  # [P] int32, result: local; -1 where another rank holds it
    first,  # word that this rank holds
    vocabulary,  # number of words that it holds
    BLOCK: tl.constexpr,
):
    """The pairs of a row."""
    row = tl.program_id(0)
    begin, end, own = tl.load(bounds + row), tl.load(bounds + row + 1), tl.load(starts + row)
    for start in range(0, end - begin, BLOCK):
        place = start + tl.arange(0, BLOCK)
        valid = place < end - begin
        word = tl.load(ids + own + place, mask=valid, other=-1) - first
        held = (word >= 0) & (word < vocabulary)
        tl.store(rows + begin + place, tl.zeros([BLOCK], tl.int32) + row, mask=valid)
        tl.store(words + begin + place, tl.where(held, word, -1), mask=valid)


@triton.jit
def pair_logits_kernel(
    hidden,  # [rows, D], rounded to the operands' dtype
    weight,  # [V, D]
    bias,  # [V]
    rows,  # [P] int32, of each pair
    words,  # [P] int32, local; -1 where another rank holds it
    logits,  # [P] fp32 or fp64, result: capped, -inf where the word is not held
    cap,
    pairs,
    width,  # D
    hidden_stride,  # between rows
    weight_stride,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The logits of some pairs."""
    dtype = logits.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    word = tl.load(words + pair, mask=pair < pairs, other=-1).to(tl.int64)
    row = tl.load(rows + pair, mask=pair < pairs, other=0).to(tl.int64)
    held = word >= 0
    total = tl.zeros([PAIRS, DEPTH], dtype)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        mask = held[:, None] & (depth < width)[None, :]
        h = tl.load(hidden + row[:, None] * hidden_stride + depth[None, :], mask=mask, other=0.0)
        w = tl.load(weight + word[:, None] * weight_stride + depth[None, :], mask=mask, other=0.0)
        total += h.to(dtype) * w.to(hidden.dtype.element_ty).to(dtype)
    z = tl.sum(total, 1)
    if bias is not None:
        z += tl.load(bias + word, mask=held, other=0.0).to(dtype)
    if cap is not None:
        z = capped(z, tl.load(cap))
    tl.store(logits + pair, tl.where(held, z, float("-inf")), mask=pair < pairs)


@triton.jit
def allowed_sums_kernel(
    logits,  # [P] fp32 or fp64; all per-row numbers have its dtype
    words,  # [P] int32, local; -1 where another rank holds it
    bounds,  # [rows + 1] int64
    target,  # [rows] int64, local; -1 where another rank holds it
    temperature,  # [rows]
    given,  # [rows], anchors; None: the kernel's own
    anchors,  # [rows], result
    gaps,  # [rows], result: d_y
    rests,  # [rows], result: S
    moments,  # [rows], result: M
    BLOCK: tl.constexpr,
):
    """The sums of a row; 0 where it has no pairs, for its set is the target alone."""
    dtype = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    begin, end, y = tl.load(bounds + row), tl.load(bounds + row + 1), tl.load(target + row)
    largest = tl.full([BLOCK], float("-inf"), dtype)
    place = tl.full([BLOCK], -1, tl.int64)
    for start in range(begin, end, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        z = tl.load(logits + pair, mask=pair < end, other=float("-inf"))
        is_target = tl.load(words + pair, mask=pair < end, other=-1) == y
        largest = tl.maximum(largest, z, propagate_nan=tl.PropagateNan.ALL)
        place = tl.where(is_target & (y >= 0) & (pair < end), pair, place)
    own = tl.max(place)
    at_target = tl.load(logits + own, mask=own >= 0, other=float("-inf"))  # a largest one would not be NaN
    anchor = tl.max(largest) if given is None else tl.load(given + row)
    anchor = tl.where(end > begin, anchor, 0.0).to(dtype)
    tau = 1.0 if temperature is None else tl.load(temperature + row)
    rest, moment = tl.zeros([BLOCK], dtype), tl.zeros([BLOCK], dtype)
    for start in range(begin, end, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        z = tl.load(logits + pair, mask=pair < end, other=float("-inf"))
        is_target = (tl.load(words + pair, mask=pair < end, other=-1) == y) & (y >= 0)
        d = tl.maximum((z - anchor) / tau, UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
        e = tl.where(is_target | (pair >= end), 0.0, tl.exp(d))
        rest += e
        moment += e * d
    tl.store(anchors + row, anchor)
    tl.store(gaps + row, tl.where(end > begin, (at_target - anchor) / tau, 0.0))
    tl.store(rests + row, tl.sum(rest))
    tl.store(moments + row, tl.sum(moment))


@triton.jit
def allowed_gradient_kernel(
    values,  # [P] fp32 or fp64: logits, which F takes the place of; all per-row numbers have its dtype
    words,  # [P] int32, local; -1 where another rank holds it
    bounds,  # [rows + 1] int64
    target,  # [rows] int64, local; -1 where another rank holds it
    temperature,  # [rows]
    anchors,  # [rows]
    means,  # [rows]: U
    at_targets,  # [rows]: F at the target but for the slope of the cap
    log_prob,  # [rows]: c; None: F is exp(d) but at the target
    entropy,  # [rows]: h
    cap,
    BLOCK: tl.constexpr,
):
    """F of a row's pairs; 0 where the word is not held."""
    row = tl.program_id(0).to(tl.int64)
    begin, end, y = tl.load(bounds + row), tl.load(bounds + row + 1), tl.load(target + row)
    anchor, at_target = tl.load(anchors + row), tl.load(at_targets + row)
    tau = 1.0 if temperature is None else tl.load(temperature + row)
    for start in range(begin, end, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        z = tl.load(values + pair, mask=pair < end, other=float("-inf"))
        word = tl.load(words + pair, mask=pair < end, other=-1)
        d = tl.maximum((z - anchor) / tau, UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
        f = tl.exp(d)
        if log_prob is not None:
            f *= tl.load(log_prob + row) + tl.load(entropy + row) * (d - tl.load(means + row))
        f = tl.where(word == y, at_target, f)
        if cap is not None:
            share = tl.where(word >= 0, z, 0.0) / tl.load(cap)
            f *= 1.0 - share * share
        tl.store(values + pair, tl.where(word >= 0, f, 0.0), mask=pair < end)


@triton.jit
def segment_kernel(
    matrix,  # [rows, D]
    index,  # [P] int32, a row of the matrix; -1: none
    factors,  # [P] fp32 or fp64
    begins,  # [segments] int64, where each segment of pairs begins
    ends,  # [segments] int64
    places,  # [segments] int64, the row of ``out`` of each
    out,  # [.., D], results
    width,  # D
    matrix_stride,  # between rows
    out_stride,
    ADD: tl.constexpr,  # to what is there
    OPERAND: tl.constexpr,  # to which the matrix is rounded
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some columns of the sum of a segment's rows, times their factors."""
    dtype = factors.dtype.element_ty
    segment = tl.program_id(0).to(tl.int64)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    begin, end = tl.load(begins + segment), tl.load(ends + segment)
    total = tl.zeros([PAIRS, DEPTH], dtype)
    for start in range(begin, end, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        row = tl.load(index + pair, mask=pair < end, other=-1).to(tl.int64)
        factor = tl.load(factors + pair, mask=pair < end, other=0.0)
        mask = (row >= 0)[:, None] & (depth < width)[None, :]
        m = tl.load(matrix + row[:, None] * matrix_stride + depth[None, :], mask=mask, other=0.0)
        total += factor[:, None] * m.to(OPERAND).to(dtype)
    found = tl.sum(total, 0)
    out += tl.load(places + segment) * out_stride + depth
    if ADD:
        found += tl.load(out, mask=depth < width, other=0.0)
    tl.store(out, found.to(out.dtype.element_ty), mask=depth < width)
