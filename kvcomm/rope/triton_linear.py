# mypy: ignore-errors
# (triton has no types, and its functions are compiled from their source rather than called)
"""The linear offset as a matrix product in front of the move: one kernel, the words of ``kvcomm.rope.triton``.

Fused because it moves the fewest bytes; docs/kernels.md has the count. Import this module late: it needs triton.
"""

import triton
import triton.language as tl

from kvcomm.rope.triton import (
    load_pairs,
    load_plain,
    load_table,
    pair_scales,
    rows,
    scales,
    store_pairs,
    store_plain,
    turn,
)


@triton.jit
def _weights(
    weights, first_row, column, w_in, w_out,
    STOP: tl.constexpr, K: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """W[first_row : first_row + K, column : STOP], [K, W]; rows from D on are zero, being those of the other half."""
    i = first_row + tl.arange(0, K)
    j = column + tl.arange(0, W)
    at = (i.to(tl.int64) * w_in)[:, None] + (j.to(tl.int64) * w_out)[None, :]
    return tl.load(weights + at, mask=(i < D)[:, None] & (j < STOP)[None, :], other=0)


@triton.jit(do_not_specialize=["count", "in_start", "out_start", "skip"])
def move_linear_kernel(
    keys, values, in_layers, in_table, in_start, in_block, in_head, in_token, in_dim,
    key_scale, value_scale,
    weights, w_layer, w_head, w_in, w_out, intercept, i_layer, i_head, i_bucket, buckets, factor, skip,
    cos, sin, layer_ids, table_ids,
    out_keys, out_values, out_layers, out_table, out_start, out_block, out_head, out_token, out_dim,
    count, heads,
    D: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, SCALED_K: tl.constexpr, SCALED_V: tl.constexpr, FACTOR: tl.constexpr,
    IN_PAGE: tl.constexpr, OUT_PAGE: tl.constexpr, IN_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    B: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = R(positions) (x + factor * (x W + intercept[bucket])), x = [base keys, base values], each times its scale.

    Grid: (tiles of B tokens, layers, heads), tokens fastest, so that W of one layer and head stays in the second-level
    cache. W [2 D, 2 D] is read K rows at a time. The tile of x is read once for the product and, from the first-level
    cache, once more for the sum.
    """
    layer = tl.load(layer_ids + tl.program_id(1)).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    table = tl.load(table_ids + layer)
    tokens = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    within = tokens < count
    inside = within[:, None]
    in_rows = rows(tokens, within, in_table, in_start, in_block, in_token, IN_PAGE)[:, None] + head * in_head
    keys += tl.multiple_of(tl.load(in_layers + 2 * layer), IN_ALIGN) + in_rows
    values += tl.multiple_of(tl.load(in_layers + 2 * layer + 1), IN_ALIGN) + in_rows
    row = layer * heads + head  # of the scales
    nth = tl.maximum(layer - skip, 0)
    weights += nth * w_layer + head * w_head
    stop = tl.where(layer >= skip, D, 0)  # no product, and zero from the intercept, in layers before skip

    FIRST: tl.constexpr = 2 * P if INTERLEAVED else P
    LAST: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    first = tl.full((B, FIRST), 0.0, tl.float32)
    second = tl.full((B, P), 0.0, tl.float32)
    value = tl.full((B, W), 0.0, tl.float32)
    rest = tl.full((B, REST if REST else 1), 0.0, tl.float32)
    i = tl.arange(0, K)[None, :].to(tl.int64)
    for half in tl.static_range(2):
        source = keys if half == 0 else values
        for at in range(0, stop, K):
            x = tl.load(source + (at + i) * in_dim, mask=inside & (at + i < D), other=0)
            if half == 0 and SCALED_K:
                x = x.to(tl.float32) * scales(key_scale, row, tokens, count, inside, at + i, D, SCALED_K)
            if half == 1 and SCALED_V:
                x = x.to(tl.float32) * scales(value_scale, row, tokens, count, inside, at + i, D, SCALED_V)
            x = x.to(weights.dtype.element_ty)
            w_half = weights + half * D * w_in
            w = _weights(w_half, at, 0, w_in, w_out, LAST, K, FIRST, D)
            first = tl.dot(x, w, first, input_precision=PRECISION)
            if not INTERLEAVED:
                w = _weights(w_half, at, PAIRS, w_in, w_out, 2 * PAIRS, K, P, D)
                second = tl.dot(x, w, second, input_precision=PRECISION)
            if REST:
                w = _weights(w_half, at, 2 * PAIRS, w_in, w_out, D, K, REST, D)
                rest = tl.dot(x, w, rest, input_precision=PRECISION)
            w = _weights(w_half, at, D, w_in, w_out, 2 * D, K, W, D)
            value = tl.dot(x, w, value, input_precision=PRECISION)
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(first, (B, P, 2)))

    changed = (tokens < tl.where(layer >= skip, count, 0))[:, None]
    bucket = tl.load(buckets + tokens, mask=within, other=0).to(tl.int64)
    mean = intercept + nth * i_layer + head * i_head + (bucket * i_bucket)[:, None]
    x, y = load_pairs(mean, changed, 1, PAIRS, P, INTERLEAVED)
    first, second = first + x, second + y
    value += load_plain(mean + D, changed, 1, 0, D, W)
    if REST:
        rest += load_plain(mean, changed, 1, 2 * PAIRS, D, REST)
    if FACTOR:
        factor_k, factor_v = tl.load(factor + 2 * nth), tl.load(factor + 2 * nth + 1)
        first, second, rest, value = first * factor_k, second * factor_k, rest * factor_k, value * factor_v

    out_rows = rows(tokens, within, out_table, out_start, out_block, out_token, OUT_PAGE)[:, None] + head * out_head
    out = out_keys + tl.multiple_of(tl.load(out_layers + 2 * layer), OUT_ALIGN) + out_rows
    x, y = load_pairs(keys, inside, in_dim, PAIRS, P, INTERLEAVED)
    if SCALED_K:
        u, v = pair_scales(key_scale, row, tokens, count, inside, D, PAIRS, P, INTERLEAVED, SCALED_K)
        x, y = x * u, y * v
    c, s = load_table(cos, sin, table, tokens, count, inside, PAIRS, P)
    first, second = turn(first + x, second + y, c, s, table)
    store_pairs(out, first, second, inside, out_dim, PAIRS, P, INTERLEAVED)
    if REST:
        x = load_plain(keys, inside, in_dim, 2 * PAIRS, D, REST)
        if SCALED_K:
            dims = 2 * PAIRS + tl.arange(0, REST)[None, :]
            x *= scales(key_scale, row, tokens, count, inside, dims, D, SCALED_K)
        store_plain(out, rest + x, inside, out_dim, 2 * PAIRS, D, REST)
    x = load_plain(values, inside, in_dim, 0, D, W)
    if SCALED_V:
        dims = tl.arange(0, W)[None, :]
        x *= scales(value_scale, row, tokens, count, inside, dims, D, SCALED_V)
    out = out_values + tl.multiple_of(tl.load(out_layers + 2 * layer + 1), OUT_ALIGN) + out_rows
    store_plain(out, value + x, inside, out_dim, 0, D, W)
