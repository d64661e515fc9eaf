"""Triton kernels over tokens and responses: what surrounds the head, one launch each.

The symbols are those of `chunks.softmax`; vectors are contiguous. Numbers come as float64, whatever the tensors'
dtype: unannotated ones would be rounded to float32 on their way. Lengths differ from call to call, and nothing is
compiled anew for them. Vectors are None where there are none.
"""

import triton
import triton.language as tl

from exgrpo.kernels import objective
from exgrpo.kernels.triton_chunks.row_kernels import UNDERFLOWN

MAX_LOG_RATIO = tl.constexpr(objective.MAX_LOG_RATIO)
STD_EPSILON = tl.constexpr(objective.STD_EPSILON)
LOST_BESIDE_ONE = tl.constexpr(-50.0)  # exp of it changes no digit of 1, in float64 either


@triton.jit
def log1p(x):
    """log(1 + x) of finite x > -1, to a rounding of its own size however small it is.

    With u the rounded 1 + x, log(1 + x) = log u + log(1 + (x - (u - 1)) / u), and the last logarithm is its argument,
    which is a rounding, to the square of one. Near 1 log u must be good to an ulp or two of its own: what Triton makes
    of tl.log is, the hardware's approximation of NVIDIA is not.
    """
    u = 1.0 + x
    return tl.log(u) + (x - (u - 1.0)) / u


@triton.jit
def expm1(x):
    """exp(x) - 1 to a rounding of its own size however small it is.

    With u the computed exp(x), wrong by some roundings, exp(x) = u exp(x - log u), and the last exponential is
    1 + (x - log u) to the square of those. u - 1 is exact near 1.
    """
    x = tl.maximum(x, LOST_BESIDE_ONE, propagate_nan=tl.PropagateNan.ALL)  # u must not be 0
    u = tl.exp(x)
    return (u - 1.0) + u * (x - tl.log(u))


@triton.jit
def _bounded(d):
    return tl.maximum(d, UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finished(gap, rest, moment):
    """Z, U, log p_y and H."""
    excess = rest + expm1(gap)
    partition = 1.0 + excess
    mean = (moment + tl.exp(gap) * _bounded(gap)) / partition
    log_partition = log1p(excess)
    return partition, mean, gap - log_partition, log_partition - mean


@triton.jit
def _objective(
    log_prob,
    old_log_prob,
    advantage,
    replayed,  # bool; None: no row is
    clip_low,
    clip_high,
    log_beta,
    HAS_CLIP: tl.constexpr,
    HAS_BETA: tl.constexpr,
):
    """Value, its derivative, ratio and whether clipped: `objective.policy_objective`."""
    log_ratio = log_prob - tl.where(old_log_prob == float("inf"), log_prob, old_log_prob)  # inf: the present policy
    ratio = tl.exp(tl.minimum(log_ratio, MAX_LOG_RATIO, propagate_nan=tl.PropagateNan.ALL))
    value = ratio * advantage
    coefficient = tl.where(log_ratio > MAX_LOG_RATIO, 0.0, value)
    clipped = tl.zeros(ratio.shape, tl.int1)
    if HAS_CLIP:
        low = tl.full([], clip_low, ratio.dtype)
        high = tl.full([], clip_high, ratio.dtype)
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        if replayed is not None:
            clipped = clipped & ~replayed
        value = tl.where(clipped, tl.where(advantage > 0, high, low) * advantage, value)
        coefficient = tl.where(clipped, 0.0, coefficient)
    if (replayed is not None) and HAS_BETA:
        logit = log_ratio - tl.full([], log_beta, ratio.dtype)
        shaped = advantage * tl.sigmoid(logit)
        value = tl.where(replayed, shaped, value)
        coefficient = tl.where(replayed, shaped * tl.sigmoid(-logit), coefficient)
    return value, coefficient, ratio, clipped


@triton.jit
def _put(results, FIELD: tl.constexpr, stride, row, rows, value):
    tl.store(results + stride.to(tl.int64) * FIELD + row, value.to(results.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    gap,  # [rows] fp32 or fp64
    rest,  # [rows], same dtype
    moment,  # [rows], same dtype
    results,  # [3, rows], same dtype: U, log p_y and H
    rows,
    BLOCK: tl.constexpr,
):
    """Statistics of each row from its sums."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    _, mean, log_prob, entropy = _finished(
        tl.load(gap + row, mask=valid), tl.load(rest + row, mask=valid), tl.load(moment + row, mask=valid)
    )
    _put(results, 0, rows, row, rows, mean)
    _put(results, 1, rows, row, rows, log_prob)
    _put(results, 2, rows, row, rows, entropy)


@triton.jit(do_not_specialize=["rows", "results_stride"])
def policy_rows_kernel(
    gap,  # [rows] fp32 or fp64
    rest,  # [rows], same dtype
    moment,  # [rows], same dtype
    old_log_prob,  # [rows], any floating dtype
    advantage,  # [rows], any floating dtype
    replayed,  # [rows] bool
    temperature,  # [rows]
    normalizer,  # [1]
    results,  # [9, rows], dtype of gap, in the order of PolicyRows
    matrix,  # [rows, V], F but for the targets, which get theirs; None: not needed here
    target,  # [rows] int64, local; -1 where this rank does not hold it; None without a matrix
    rows,
    results_stride,  # between fields of the results
    matrix_stride,  # between rows of the matrix
    clip_low: tl.float64,  # the lowest ratio that is not clipped; unused without HAS_CLIP
    clip_high: tl.float64,
    log_beta: tl.float64,  # unused without HAS_BETA
    entropy_coef: tl.float64,  # unused where PLAIN
    HAS_CLIP: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the sums of each row to its objective, the gradient of the loss and the factors of `softmax.row_factors`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    d = tl.load(gap + row, mask=valid)
    s = tl.load(rest + row, mask=valid)
    partition, mean, log_prob, entropy = _finished(d, s, tl.load(moment + row, mask=valid))
    value, derivative, ratio, clipped = _objective(
        log_prob,
        tl.load(old_log_prob + row, mask=valid).to(d.dtype),
        tl.load(advantage + row, mask=valid).to(d.dtype),
        None if replayed is None else tl.load(replayed + row, mask=valid),
        clip_low,
        clip_high,
        log_beta,
        HAS_CLIP,
        HAS_BETA,
    )
    divisor = tl.load(normalizer).to(d.dtype)
    coefficient = -derivative / divisor
    scale = -1.0 / partition
    if temperature is not None:
        scale /= tl.load(temperature + row, mask=valid, other=1.0).to(d.dtype)
    if PLAIN:
        scale *= coefficient
        at_target = -s
    else:
        h = -tl.full([], entropy_coef, d.dtype) / divisor
        at_target = h * tl.exp(d) * (_bounded(d) - mean) - s * coefficient
    _put(results, 0, results_stride, row, rows, value)
    _put(results, 1, results_stride, row, rows, log_prob)
    _put(results, 2, results_stride, row, rows, entropy)
    _put(results, 3, results_stride, row, rows, ratio)
    _put(results, 4, results_stride, row, rows, clipped)
    _put(results, 5, results_stride, row, rows, mean)
    _put(results, 6, results_stride, row, rows, coefficient)
    _put(results, 7, results_stride, row, rows, scale)
    _put(results, 8, results_stride, row, rows, at_target)
    if matrix is not None:
        y = tl.load(target + row, mask=valid, other=-1)
        place = row.to(tl.int64) * matrix_stride + y
        tl.store(matrix + place, at_target.to(matrix.dtype.element_ty), mask=y >= 0)


@triton.jit(do_not_specialize=["tokens"])
def policy_objective_kernel(
    log_prob,  # [T] fp32 or fp64
    entropy,  # [T], any floating dtype
    old_log_prob,  # [T], any floating dtype
    advantage,  # [T], any floating dtype
    replayed,  # [T] bool
    counted,  # [T] bool
    results,  # [4, T], dtype of log_prob: log_prob, entropy, ratio, clipped
    coefficients,  # [1, T], same dtype
    partials,  # [3, programs] fp64: sums of values and entropies, number of tokens counted
    tokens,
    clip_low: tl.float64,
    clip_high: tl.float64,
    log_beta: tl.float64,
    HAS_CLIP: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Objective of each token, and the sums over a block of them. What is not counted is not even read."""
    dtype: tl.constexpr = log_prob.dtype.element_ty
    program = tl.program_id(0)
    token = program * BLOCK + tl.arange(0, BLOCK)
    kept = token < tokens
    if counted is not None:
        kept = tl.load(counted + token, mask=kept, other=0) != 0
    current = tl.load(log_prob + token, mask=kept, other=0.0)
    spread = tl.zeros([BLOCK], dtype)
    if entropy is not None:
        spread = tl.load(entropy + token, mask=kept, other=0.0).to(dtype)
    value, coefficient, ratio, clipped = _objective(
        current,
        tl.load(old_log_prob + token, mask=kept, other=0.0).to(dtype),
        tl.load(advantage + token, mask=kept, other=0.0).to(dtype),
        None if replayed is None else tl.load(replayed + token, mask=kept, other=0) != 0,
        clip_low,
        clip_high,
        log_beta,
        HAS_CLIP,
        HAS_BETA,
    )
    _put(results, 0, tokens, token, tokens, current)
    _put(results, 1, tokens, token, tokens, spread)
    _put(results, 2, tokens, token, tokens, tl.where(kept, ratio, 0.0))
    _put(results, 3, tokens, token, tokens, clipped)
    _put(coefficients, 0, tokens, token, tokens, coefficient)
    programs = tl.num_programs(0)
    tl.store(partials + program, tl.sum(value).to(tl.float64))
    tl.store(partials + programs + program, tl.sum(spread).to(tl.float64))
    tl.store(partials + 2 * programs + program, tl.sum(kept.to(tl.int32)).to(tl.float64))


@triton.jit
def _same_group(group, reward, own, start, responses, COLUMNS: tl.constexpr):
    """Rewards [1, COLUMNS] from ``start`` on, and which of them belong to each of the groups ``own`` [ROWS]."""
    other = start + tl.arange(0, COLUMNS)
    valid = other < responses
    same = (own[:, None] == tl.load(group + other, mask=valid)[None, :]) & valid[None, :]
    return tl.load(reward + other, mask=valid).to(tl.float64)[None, :], same


@triton.jit(do_not_specialize=["responses"])
def centre_groups_kernel(
    reward,  # [N], any dtype
    group,  # [N] int32 or int64
    centred,  # [N] fp64, result
    responses,
    SCALE_BY_STD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Reward less the mean of its group. Each block of responses compares its groups with those of all."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < responses
    own = tl.load(group + row, mask=valid)
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    members = tl.zeros([ROWS, COLUMNS], tl.int32)
    for start in range(0, responses, COLUMNS):
        rewards, same = _same_group(group, reward, own, start, responses, COLUMNS)
        total += tl.where(same, rewards, 0.0)
        members += same.to(tl.int32)
    count = tl.maximum(tl.sum(members, 1), 1).to(tl.float64)  # beyond the end there may be none
    mean = tl.sum(total, 1) / count
    result = tl.load(reward + row, mask=valid).to(tl.float64) - mean
    if SCALE_BY_STD:
        squares = tl.zeros([ROWS, COLUMNS], tl.float64)
        for start in range(0, responses, COLUMNS):
            rewards, same = _same_group(group, reward, own, start, responses, COLUMNS)
            deviation = tl.where(same, rewards - mean[:, None], 0.0)
            squares += deviation * deviation
        result /= tl.sqrt(tl.sum(squares, 1) / tl.maximum(count - 1.0, 1.0)) + STD_EPSILON
    tl.store(centred + row, result, mask=valid)


@triton.jit(do_not_specialize=["entries"])
def scale_kernel(
    values,  # [entries], any floating dtype
    factor,  # [], float32 or float64
    entries,
    BLOCK: tl.constexpr,
):
    """Multiplies the values; if the factor is 1, nothing is read or written. All programs go through them together."""
    by = tl.load(factor)
    if by != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, entries, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < entries, other=0.0)
            tl.store(values + at, (value.to(by.dtype) * by).to(value.dtype), mask=at < entries)


@triton.jit
def segment_mean_kernel(
    values,  # [T], any floating dtype
    counted,  # [T] bool
    offsets,  # [N + 1] int32 or int64
    means,  # [N], dtype of values
    BLOCK: tl.constexpr,
):
    """Mean of the values of a segment that are counted; a program for each."""
    segment = tl.program_id(0)
    first = tl.load(offsets + segment)
    last = tl.load(offsets + segment + 1)
    total = tl.zeros([BLOCK], tl.float64)
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        kept = tl.load(counted + token, mask=token < last, other=0) != 0
        total += tl.load(values + token, mask=kept, other=0.0).to(tl.float64)
        number += kept.to(tl.int32)
    mean = tl.sum(total) / tl.maximum(tl.sum(number), 1).to(tl.float64)
    tl.store(means + segment, mean.to(means.dtype.element_ty))
