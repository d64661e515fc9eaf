"""Triton kernels over the rows of a chunk of logits, one program per row.

x_v is a raw product, z_v = cap(x_v + b_v) the logit, y the target, a the row's anchor, d_v = (z_v - a) / tau.
``bias``, ``cap`` [1] and ``temperature`` are None where there are none.
"""

import triton
import triton.language as tl

from exgrpo.kernels.chunks import softmax

LARGEST_SUM = tl.constexpr(64.0)
UNDERFLOWN = tl.constexpr(softmax.UNDERFLOWN)


@triton.jit
def capped(x, softcap):
    """softcap * tanh(x / softcap), by one exponential, which may overflow: the quotient is 0 then."""
    return softcap - 2.0 * softcap / (1.0 + tl.exp(x * (2.0 / softcap)))


@triton.jit
def _shaped(logits, bias, columns, valid, softcap):
    """z of some columns; -inf beyond the vocabulary."""
    x = tl.load(logits + columns, mask=valid, other=float("-inf"))
    if bias is not None:
        x += tl.load(bias + columns, mask=valid, other=0.0).to(x.dtype)
    if softcap is not None:
        x = tl.where(valid, capped(x, softcap), float("-inf"))
    return x


@triton.jit
def _sums(logits, bias, out, y, anchor, temperature, softcap, vocabulary, BLOCK: tl.constexpr):
    """S and M of a row over v != y; exp(d), 0 at y, goes to ``out``, if it is not None."""
    rest = tl.zeros([BLOCK], logits.dtype.element_ty)
    moment = tl.zeros([BLOCK], logits.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        valid = columns < vocabulary
        z = _shaped(logits, bias, columns, valid, softcap)
        d = tl.maximum((z - anchor) / temperature, UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
        e = tl.where((columns == y) | ~valid, 0.0, tl.exp(d))
        rest += e
        moment += e * d
        if out is not None:
            tl.store(out + columns, e.to(out.dtype.element_ty), mask=valid)
    return tl.sum(rest), tl.sum(moment)


@triton.jit
def _largest(logits, bias, softcap, vocabulary, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _shaped(logits, bias, columns, columns < vocabulary, softcap)
        largest = tl.maximum(largest, z)
    return tl.max(largest)


@triton.jit
def listed_largest_kernel(
    logits,  # [rows, V] fp32 or fp64, raw products
    bias,  # [V]
    listed,  # [rows] bool
    largest,  # [rows], result: the largest logit of a listed row, -inf for others
    cap,
    vocabulary,
    stride,  # between rows of logits
    BLOCK: tl.constexpr,
):
    """The largest logits of the listed rows, which alone are read."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.where(tl.load(listed + row), vocabulary, 0)
    softcap = None if cap is None else tl.load(cap)
    found = _largest(logits + row * stride, bias, softcap, columns, BLOCK)
    tl.store(largest + row, found)


@triton.jit
def statistics_kernel(
    logits,  # [rows, V] fp32 or fp64, raw products; all per-row numbers have its dtype
    bias,  # [V]
    out,  # [rows, V], receives exp(d), not ``logits``; or None
    target,  # [rows] int64, local; -1 where this rank does not hold it
    temperature,  # [rows]
    given,  # [rows], anchors; None: the kernel's own
    listed,  # [rows] bool, the rows that are read, S and M of others are 0; None: all are
    anchors,  # [rows], result
    gaps,  # [rows], result: d_y
    rests,  # [rows], result: S
    moments,  # [rows], result: M
    cap,
    vocabulary,
    stride,  # between rows of logits and out
    BLOCK: tl.constexpr,
):
    """Sums of each row, S = sum_{v != y} exp(d_v) and M = sum_{v != y} exp(d_v) d_v.

    The anchor is the target's logit: no running maximum, no rescaling, one reading. Where S exceeds LARGEST_SUM, p_y
    being below 1 / 65, the row is read twice more with its largest logit as anchor: nothing can overflow then, and the
    entropy, log Z - U, is never a small difference of large numbers. Such tokens are rare where targets are sampled.
    """
    softcap = None if cap is None else tl.load(cap)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    if out is not None:
        out += row * stride
    y = tl.load(target + row)
    tau = 1.0 if temperature is None else tl.load(temperature + row)
    at_target = _shaped(logits, bias, y, y >= 0, softcap)
    anchor = at_target if given is None else tl.load(given + row)
    if listed is not None:
        vocabulary = tl.where(tl.load(listed + row), vocabulary, 0)
    rest, moment = _sums(logits, bias, out, y, anchor, tau, softcap, vocabulary, BLOCK)
    if (given is None) and not (rest <= LARGEST_SUM):
        anchor = _largest(logits, bias, softcap, vocabulary, BLOCK)
        rest, moment = _sums(logits, bias, out, y, anchor, tau, softcap, vocabulary, BLOCK)
    tl.store(anchors + row, anchor)
    tl.store(gaps + row, (at_target - anchor) / tau)
    tl.store(rests + row, rest)
    tl.store(moments + row, moment)


@triton.jit
def gradient_kernel(
    logits,  # [rows, V] fp32 or fp64, raw products; all per-row numbers have its dtype
    bias,  # [V]
    out,  # [rows, V], receives F; may be ``logits``
    target,  # [rows] int64, local; -1 where this rank does not hold it
    temperature,  # [rows]
    anchors,  # [rows]
    means,  # [rows], U
    at_target,  # [rows], F at the target but for the slope of the cap
    upstream_log_prob,  # [rows], c; None: F is exp(d) off the target
    upstream_entropy,  # [rows], h
    cap,
    vocabulary,
    stride,
    BLOCK: tl.constexpr,
):
    """F of each row: exp(d_v), or exp(d_v) (c + h (d_v - U)) times the slope of the cap."""
    softcap = None if cap is None else tl.load(cap)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * stride
    y = tl.load(target + row)
    tau = 1.0 if temperature is None else tl.load(temperature + row)
    anchor = tl.load(anchors + row)
    mean = tl.load(means + row)
    value_at_target = tl.load(at_target + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        valid = columns < vocabulary
        z = _shaped(logits, bias, columns, valid, softcap)
        d = tl.maximum((z - anchor) / tau, UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
        f = tl.exp(d)
        if upstream_log_prob is not None:
            c = tl.load(upstream_log_prob + row)
            h = tl.load(upstream_entropy + row)
            f *= c + h * (d - mean)
        f = tl.where(columns == y, value_at_target, f)
        if softcap is not None:
            f *= 1.0 - (z / softcap) * (z / softcap)
        tl.store(out + columns, f.to(out.dtype.element_ty), mask=valid)


@triton.jit
def entropy_kernel(
    matrix,  # [rows, V], exp(d) of any floating dtype; becomes F
    target,  # [rows] int64, local; -1 where this rank does not hold it
    means,  # [rows] fp32, U
    at_target,  # [rows] fp32, F at the target
    upstream_log_prob,  # [rows] fp32, c
    upstream_entropy,  # [rows] fp32, h
    vocabulary,
    stride,  # between rows of the matrix
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a row, for each program
):
    """F of each row from its exponentials, exp(d_v) (c + h (d_v - U)): d is their logarithm. Programs: rows, parts.

    Rounded to bf16 exp(d) is d to 2^-9, a part in a thousand of the d - U it stands in: no more than F is rounded by.
    """
    row = tl.program_id(0).to(tl.int64)
    matrix += row * stride
    y = tl.load(target + row)
    mean = tl.load(means + row)
    value_at_target = tl.load(at_target + row)
    c = tl.load(upstream_log_prob + row)
    h = tl.load(upstream_entropy + row)
    for block in range(BLOCKS):
        columns = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        valid = columns < vocabulary
        e = tl.load(matrix + columns, mask=valid, other=0.0).to(tl.float32)
        d = tl.maximum(tl.log(e), UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
        f = tl.where(columns == y, value_at_target, e * (c + h * (d - mean)))
        tl.store(matrix + columns, f.to(matrix.dtype.element_ty), mask=valid)
