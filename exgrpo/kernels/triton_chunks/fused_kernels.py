"""Triton kernels of the product hidden @ weight.T whose epilogue is the softmax: the logits stay in registers.

x_v is a raw product, z_v = x_v + b_v the logit, y the target, a the row's anchor, d_v = (z_v - a) / tau. All sums are
fp32. ``bias`` and ``temperature`` are None where there are none.
"""

import triton
import triton.language as tl

from exgrpo.kernels.triton_chunks.row_kernels import UNDERFLOWN

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(16)  # row tiles that go through the vocabulary together: they and as much weight fit the L2 cache


@triton.jit
def _logits(x, bias, columns, valid):
    """z of raw products x [..., columns]."""
    if bias is not None:
        x += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)
    return x


@triton.jit
def target_logit_kernel(
    hidden,  # [rows, D]
    weight,  # [V, D]
    bias,  # [V]
    target,  # [rows] int64, local; -1 where this rank does not hold it
    logits,  # [rows] fp32, result
    width,  # D
    vocabulary_stride,  # of the weight, as width_stride
    width_stride,
    BLOCK: tl.constexpr,
):
    """z_y of each row, -inf where the target is not held."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    held = y >= 0
    hidden += row * width
    weight += y * vocabulary_stride
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        depth = start + tl.arange(0, BLOCK)
        mask = depth < tl.where(held, width, 0)
        h = tl.load(hidden + depth, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight + depth.to(tl.int64) * width_stride, mask=mask, other=0.0).to(tl.float32)
        total += h * w
    z = _logits(tl.sum(total), bias, y, held)
    tl.store(logits + row, tl.where(held, z, float("-inf")))


@triton.jit
def _tile(index, row_tiles, column_tiles):
    """Row and column of the index-th tile: GROUP row tiles in turn, then the same with the next columns."""
    group = index // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = index - group * GROUP * column_tiles
    return group * GROUP + within % height, within // height


@triton.jit
def _row_numbers(first_row, listed, rows, ROWS: tl.constexpr):
    """The rows of a tile, ``rows`` or more where there are none left."""
    row = first_row + tl.arange(0, ROWS)
    if listed is not None:
        row = tl.load(listed + row, mask=row < rows, other=rows)
    return row


@triton.jit
def _product(
    hidden,
    weight,
    first_row,
    row,
    first_column,
    rows,
    vocabulary,
    width,
    vocabulary_stride,
    width_stride,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x of a tile [ROWS, COLUMNS]; 0 beyond the matrices."""
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    column = first_column + tl.arange(0, COLUMNS)
    for start in range(0, width, DEPTH):
        if DESCRIBED:
            h = hidden.load([first_row, start])
            w = weight.load([first_column, start]).T
        else:
            depth = start + tl.arange(0, DEPTH)
            inside = depth < width
            h_pointers = hidden + row.to(tl.int64)[:, None] * width + depth[None, :]
            h = tl.load(h_pointers, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            w_pointers = weight + column.to(tl.int64)[None, :] * vocabulary_stride
            w_pointers += depth.to(tl.int64)[:, None] * width_stride
            w = tl.load(w_pointers, mask=inside[:, None] & (column < vocabulary)[None, :], other=0.0)
        x = tl.dot(h, w, x)
    return x


@triton.jit
def _row_values(target, anchors, temperature, row, taken):
    """y, a and what turns z - a into d / ln 2: powers of 2 are what the machine has."""
    y = tl.load(target + row, mask=taken, other=-1).to(tl.int32)
    anchor = tl.load(anchors + row, mask=taken, other=0.0)
    scale = tl.full([row.shape[0]], LOG2_E, tl.float32)
    if temperature is not None:
        scale /= tl.load(temperature + row, mask=taken, other=1.0)
    return y, anchor, scale


@triton.jit
def _exponentials(x, bias, column, valid, y, anchor, scale):
    """exp(d), 0 at the target and where not valid; the sums of exp(d) and of exp(d) d / ln 2."""
    z = _logits(x, bias, column, valid)
    d = tl.maximum((z - anchor[:, None]) * scale[:, None], UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
    e = tl.where((column[None, :] == y[:, None]) | ~valid[None, :], 0.0, tl.exp2(d))
    return e, tl.sum(e, 1), tl.sum(e * d, 1)


@triton.jit
def _gradients(x, bias, column, valid, y, anchor, scale, at_target, intercept, slope):
    """F: exp(d) times what is linear in d, at the target its own value; 0 where not valid."""
    z = _logits(x, bias, column, valid)
    d = tl.maximum((z - anchor[:, None]) * scale[:, None], UNDERFLOWN, propagate_nan=tl.PropagateNan.ALL)
    f = tl.exp2(d)
    if slope is not None:
        f *= intercept[:, None] + slope[:, None] * d
    return tl.where(column[None, :] == y[:, None], at_target[:, None], tl.where(valid[None, :], f, 0.0))


@triton.jit
def _is_far(merged, row, rows, limit):
    """True if S of a row is beyond the limit, overflown, or NaN."""
    return ~(tl.load(merged + row, mask=row < rows, other=0.0) <= limit)


@triton.jit(do_not_specialize=["rows", "column_tiles"])
def merge_kernel(
    rests,  # [column tiles, rows]: S of each tile
    moments,  # [column tiles, rows]: M of each tile
    results,  # [2, rows], result: S and M; [3, rows] where rows were done again: d_y, too
    before,  # [2, rows], S and M of rows that were not done again; None: there was nothing before, as all below
    merged,  # [rows], S over all ranks
    limit,  # of S: beyond it a row was done again
    at_target,  # [rows], z_y
    anchors,  # [rows]
    temperature,  # [rows]; None: 1
    column_tiles,
    rows,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums over the tiles."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    taken = valid
    if before is not None:
        taken = _is_far(merged, row, rows, limit)
    rest = tl.zeros([TILES, ROWS], tl.float32)
    moment = tl.zeros([TILES, ROWS], tl.float32)
    for start in range(0, column_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        place = tile.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (tile < column_tiles)[:, None] & taken[None, :]
        rest += tl.load(rests + place, mask=mask, other=0.0)
        moment += tl.load(moments + place, mask=mask, other=0.0)
    s, m = tl.sum(rest, 0), tl.sum(moment, 0)
    if before is not None:
        s = tl.where(taken, s, tl.load(before + row, mask=valid, other=0.0))
        m = tl.where(taken, m, tl.load(before + rows + row, mask=valid, other=0.0))
        gap = tl.load(at_target + row, mask=valid, other=0.0) - tl.load(anchors + row, mask=valid, other=0.0)
        if temperature is not None:
            gap /= tl.load(temperature + row, mask=valid, other=1.0)
        tl.store(results + 2 * rows + row, gap, mask=valid)
    tl.store(results + row, s, mask=valid)
    tl.store(results + rows + row, m, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    merged,  # [rows], S over all ranks
    limit,  # of S
    listed,  # [rows + 1] int32, result: the rows beyond it, then numbers beyond all rows; the last is how many they are
    rows,
    BLOCK: tl.constexpr,
):
    """List rows in order; one program does."""
    count = tl.zeros([], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        far = _is_far(merged, row, rows, limit)
        place = count + tl.cumsum(far.to(tl.int32), 0) - 1  # of the last listed row so far: others go to the end
        tl.store(listed + tl.where(far, place, rows - row + place), tl.where(far, row, rows), mask=row < rows)
        count += tl.sum(far.to(tl.int32))
    tl.store(listed + rows, count)


@triton.jit(do_not_specialize=["rows", "column_tiles"])
def anchor_kernel(
    largest,  # [column tiles, rows]: the largest z of each tile, of listed rows
    merged,  # [rows], S over all ranks
    limit,  # of S: beyond it a row is listed
    at_target,  # [rows], z_y
    anchors,  # [rows], result: the largest z of a listed row, z_y of others
    column_tiles,
    rows,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The anchors of all rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    far = _is_far(merged, row, rows, limit)
    found = tl.full([TILES, ROWS], float("-inf"), tl.float32)
    for start in range(0, column_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        place = tile.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (tile < column_tiles)[:, None] & far[None, :]
        z = tl.load(largest + place, mask=mask, other=float("-inf"))
        found = tl.maximum(found, z, propagate_nan=tl.PropagateNan.ALL)
    anchor = tl.where(far, tl.max(found, 0), tl.load(at_target + row, mask=row < rows, other=0.0))
    tl.store(anchors + row, anchor, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def exponentials_kernel(
    hidden,  # [rows, D]; a descriptor where DESCRIBED, as weight and out
    weight,  # [V, D]
    bias,  # [V]
    target,  # [rows] int64, local; -1 where this rank does not hold it
    anchors,  # [rows]
    temperature,  # [rows]
    listed,  # [rows + 1] int32, the rows that are wanted, see `list_kernel`; None: all are. Not with DESCRIBED
    out,  # [rows, V], receives exp(d); may be None
    rests,  # [column tiles, rows], result: S over the tile's columns
    moments,  # [column tiles, rows], result: M over the tile's columns
    at_target,  # [rows], F at the target: ``out`` receives F, and there are no sums; None: exp(d), as above
    intercepts,  # [rows], c - h U; None, as slopes: 1 and 0
    slopes,  # [rows], h
    rows,
    vocabulary,  # V
    width,  # D
    vocabulary_stride,  # of the weight, as width_stride
    width_stride,
    out_stride,
    DESCRIBED: tl.constexpr,
    OVERLAPPED: tl.constexpr,  # the next tile's loads begin before this one's epilogue
    PARTS: tl.constexpr,  # 1, or 2: the epilogue takes half the columns at a time and needs fewer registers
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """exp(d) and its sums, or F; each program goes through tiles until there are no more."""
    row_tiles = tl.cdiv(rows if listed is None else tl.load(listed + rows), ROWS)
    tiles = row_tiles * tl.cdiv(vocabulary, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=OVERLAPPED):
        row_tile, column_tile = _tile(index, row_tiles, tl.cdiv(vocabulary, COLUMNS))
        row = _row_numbers(row_tile * ROWS, listed, rows, ROWS)
        # fmt: off
        x = _product(
            hidden, weight, row_tile * ROWS, row, column_tile * COLUMNS, rows, vocabulary, width,
            vocabulary_stride, width_stride, DESCRIBED, ROWS, COLUMNS, DEPTH,
        )
        # fmt: on
        taken = row < rows
        y, anchor, scale = _row_values(target, anchors, temperature, row, taken)
        value = None if at_target is None else tl.load(at_target + row, mask=taken, other=0.0)
        intercept = None if slopes is None else tl.load(intercepts + row, mask=taken, other=0.0)
        slope = None if slopes is None else tl.load(slopes + row, mask=taken, other=0.0) * LN_2
        rest = tl.zeros([ROWS], tl.float32)
        moment = tl.zeros([ROWS], tl.float32)
        parts = (x,) if PARTS == 1 else x.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        for part in tl.static_range(PARTS):
            first = column_tile * COLUMNS + part * (COLUMNS // PARTS)
            column = first + tl.arange(0, COLUMNS // PARTS)
            valid = column < vocabulary
            if at_target is None:
                e, r, m = _exponentials(parts[part], bias, column, valid, y, anchor, scale)
                rest += r
                moment += m
            else:
                e = _gradients(parts[part], bias, column, valid, y, anchor, scale, value, intercept, slope)
            if out is not None and DESCRIBED:
                out.store([row_tile * ROWS, first], e.to(out.dtype))
            elif out is not None:
                pointers = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
                tl.store(pointers, e.to(out.dtype.element_ty), mask=taken[:, None] & valid[None, :])
        if at_target is None:
            partial = column_tile.to(tl.int64) * rows + row
            tl.store(rests + partial, rest, mask=taken)
            tl.store(moments + partial, moment * LN_2, mask=taken)


@triton.jit(do_not_specialize=["rows"])
def largest_kernel(
    hidden,  # [rows, D]
    weight,  # [V, D]
    bias,  # [V]
    listed,  # [rows + 1] int32, the rows that are wanted, see `list_kernel`
    largest,  # [column tiles, rows], result: the largest z of the tile's columns, for listed rows
    rows,
    vocabulary,  # V
    width,  # D
    vocabulary_stride,  # of the weight, as width_stride
    width_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The largest logits of some rows; each program goes through tiles until there are no more."""
    row_tiles = tl.cdiv(tl.load(listed + rows), ROWS)
    tiles = row_tiles * tl.cdiv(vocabulary, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_tile, column_tile = _tile(index, row_tiles, tl.cdiv(vocabulary, COLUMNS))
        row = _row_numbers(row_tile * ROWS, listed, rows, ROWS)
        # fmt: off
        x = _product(
            hidden, weight, row_tile * ROWS, row, column_tile * COLUMNS, rows, vocabulary, width,
            vocabulary_stride, width_stride, False, ROWS, COLUMNS, DEPTH,
        )
        # fmt: on
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        valid = column < vocabulary
        z = tl.where(valid[None, :], _logits(x, bias, column, valid), float("-inf"))
        tl.store(largest + column_tile.to(tl.int64) * rows + row, tl.max(z, 1), mask=row < rows)
