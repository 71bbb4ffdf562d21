# mypy: ignore-errors
# (triton has no types, and its functions are compiled from their source rather than called)
"""Triton kernels: base + offset, turned and written into place, all layers and heads of a segment in one launch.

Import this module late: it needs triton. ``kvcomm.rope.launch`` checks arguments, chooses tiles and launches.

Both kernels take rows from one place to another. A place is a first layer's pointer, for each layer its distance from
it in elements (int64, [layers, 2]: keys, values), and strides; a paged one also has a block table, and token t lies in
row t % BLOCK_SIZE of block ``table[t // BLOCK_SIZE]``. Addresses are int64 throughout. Arithmetic is float32, with one
rounding on the way out. Cosines and sines are read from tables (float32 [tables, tokens, PAIRS]); the opposite
rotation is the same kernel with the sines negated. A program keeps its piece of the table for all heads that it does.

In comments: B tokens of a tile, P pairs padded to a power of two, W a width padded to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def rows(tokens, inside, block_table, start, stride_block, stride_token, BLOCK_SIZE: tl.constexpr):
    """Distance of each token's row from the start of its layer and head: int64 [B]."""
    at = start + tokens
    if BLOCK_SIZE > 0:
        block = tl.load(block_table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        result = block * stride_block + (at % BLOCK_SIZE) * stride_token
    else:
        result = at * stride_token
    return result


@triton.jit
def load_pairs(rows, inside, stride, PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of each pair, float32 [B, P] twice, from row pointers [B, 1]."""
    if INTERLEAVED:  # read as they lie, then separated in registers
        i = tl.arange(0, 2 * P).to(tl.int64)[None, :]
        both = tl.load(rows + i * stride, mask=inside & (i < 2 * PAIRS), other=0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], P, 2)))
    else:
        i = tl.arange(0, P).to(tl.int64)[None, :]
        first = tl.load(rows + i * stride, mask=inside & (i < PAIRS), other=0)
        second = tl.load(rows + (i + PAIRS) * stride, mask=inside & (i < PAIRS), other=0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(rows, first, second, inside, stride, PAIRS: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        i = tl.arange(0, 2 * P).to(tl.int64)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * P))
        tl.store(rows + i * stride, both.to(dtype), mask=inside & (i < 2 * PAIRS))
    else:
        i = tl.arange(0, P).to(tl.int64)[None, :]
        tl.store(rows + i * stride, first.to(dtype), mask=inside & (i < PAIRS))
        tl.store(rows + (i + PAIRS) * stride, second.to(dtype), mask=inside & (i < PAIRS))


@triton.jit
def load_plain(rows, inside, stride, FROM: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Dimensions FROM to D, float32 [B, W], from row pointers [B, 1]."""
    i = FROM + tl.arange(0, W).to(tl.int64)[None, :]
    return tl.load(rows + i * stride, mask=inside & (i < D), other=0).to(tl.float32)


@triton.jit
def store_plain(rows, x, inside, stride, FROM: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    i = FROM + tl.arange(0, W).to(tl.int64)[None, :]
    tl.store(rows + i * stride, x.to(rows.dtype.element_ty), mask=inside & (i < D))


@triton.jit
def scales(scale, row, tokens, count, inside, dims, D, SCALED: tl.constexpr):
    """What int8 codes are multiplied by: SCALED 1, a number a token ([B, 1]); 2, a number a dimension ([1, W]).

    ``row`` is layer * heads + head; ``dims`` [1, W] are the dimensions wanted.
    """
    if SCALED == 1:
        s = tl.load(scale + (row * count + tokens)[:, None], mask=inside, other=0)
    else:
        s = tl.load(scale + row * D + dims, mask=dims < D, other=0)
    return s


@triton.jit
def pair_scales(
    scale, row, tokens, count, inside, D, PAIRS: tl.constexpr, P: tl.constexpr,
    INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """``scales`` of the first and the second members of pairs."""
    i = tl.arange(0, P)[None, :]
    if INTERLEAVED:
        first = scales(scale, row, tokens, count, inside, 2 * i, D, SCALED)
        second = scales(scale, row, tokens, count, inside, 2 * i + 1, D, SCALED)
    else:
        first = scales(scale, row, tokens, count, inside, i, D, SCALED)
        second = scales(scale, row, tokens, count, inside, i + PAIRS, D, SCALED)
    return first, second


@triton.jit
def load_table(cos, sin, table, tokens, count, inside, PAIRS: tl.constexpr, P: tl.constexpr):
    i = tl.arange(0, P)[None, :]
    at = (table.to(tl.int64) * count + tokens)[:, None] * PAIRS + i
    mask = inside & (i < tl.where(table >= 0, PAIRS, 0))
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def turn(first, second, c, s, table):
    """A layer without rope (table -1) keeps its keys bit for bit, infinities too."""
    return (
        tl.where(table >= 0, first * c - second * s, first),
        tl.where(table >= 0, second * c + first * s, second),
    )


# One compiled kernel for all lengths: Triton would make others for a count of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["count", "in_start", "out_start", "skip", "heads_each"])
def move_kernel(
    keys, values, in_layers, in_table, in_start, in_block, in_head, in_token, in_dim,
    key_scale, value_scale,
    offset_keys, offset_values, offset_layers, offset_head, offset_token, offset_dim, factor, skip,
    cos, sin, layer_ids, table_ids,
    out_keys, out_values, out_layers, out_table, out_start, out_block, out_head, out_token, out_dim,
    count, heads, heads_each,
    D: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, VALUES: tl.constexpr, SCALED_K: tl.constexpr, SCALED_V: tl.constexpr,
    OFFSET: tl.constexpr, FACTOR: tl.constexpr, IN_PAGE: tl.constexpr, OUT_PAGE: tl.constexpr,
    IN_ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, OFFSET_ALIGN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out = R(positions) (base * scale + factor * offset) for keys, the same without R for values.

    Grid: (tiles of B tokens, layers, groups of ``heads_each`` heads). Layers before ``skip`` have no offset. REST is
    the padded number of key dimensions that are not turned, or 0.
    """
    layer = tl.load(layer_ids + tl.program_id(1)).to(tl.int64)
    table = tl.load(table_ids + layer)
    tokens = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    within = tokens < count
    inside = within[:, None]
    c, s = load_table(cos, sin, table, tokens, count, inside, PAIRS, P)
    in_rows = rows(tokens, within, in_table, in_start, in_block, in_token, IN_PAGE)[:, None]
    out_rows = rows(tokens, within, out_table, out_start, out_block, out_token, OUT_PAGE)[:, None]
    keys += tl.multiple_of(tl.load(in_layers + 2 * layer), IN_ALIGN)
    out_keys += tl.multiple_of(tl.load(out_layers + 2 * layer), OUT_ALIGN)
    if VALUES:
        values += tl.multiple_of(tl.load(in_layers + 2 * layer + 1), IN_ALIGN)
        out_values += tl.multiple_of(tl.load(out_layers + 2 * layer + 1), OUT_ALIGN)
    if OFFSET:
        changed = (tokens < tl.where(layer >= skip, count, 0))[:, None]
        offset_rows = tokens[:, None] * offset_token
        nth = tl.maximum(layer - skip, 0)
        offset_keys += tl.multiple_of(tl.load(offset_layers + 2 * nth), OFFSET_ALIGN)
        if VALUES:
            offset_values += tl.multiple_of(tl.load(offset_layers + 2 * nth + 1), OFFSET_ALIGN)
        if FACTOR:
            factor_k, factor_v = tl.load(factor + 2 * nth), tl.load(factor + 2 * nth + 1)
    group = tl.program_id(2).to(tl.int64) * heads_each
    for head in range(group, tl.minimum(group + heads_each, heads)):
        scale_row = layer * heads + head
        row = keys + head * in_head + in_rows
        out = out_keys + head * out_head + out_rows
        first, second = load_pairs(row, inside, in_dim, PAIRS, P, INTERLEAVED)
        if SCALED_K:
            x, y = pair_scales(key_scale, scale_row, tokens, count, inside, D, PAIRS, P, INTERLEAVED, SCALED_K)
            first, second = first * x, second * y
        if OFFSET:
            added = offset_keys + head * offset_head + offset_rows
            x, y = load_pairs(added, changed, offset_dim, PAIRS, P, INTERLEAVED)
            if FACTOR:
                x, y = x * factor_k, y * factor_k
            first, second = first + x, second + y
        first, second = turn(first, second, c, s, table)
        store_pairs(out, first, second, inside, out_dim, PAIRS, P, INTERLEAVED)
        if REST:
            x = load_plain(row, inside, in_dim, 2 * PAIRS, D, REST)
            if SCALED_K:
                dims = 2 * PAIRS + tl.arange(0, REST)[None, :]
                x *= scales(key_scale, scale_row, tokens, count, inside, dims, D, SCALED_K)
            if OFFSET:
                y = load_plain(offset_keys + head * offset_head + offset_rows, changed, offset_dim, 2 * PAIRS, D, REST)
                if FACTOR:
                    y *= factor_k
                x += y
            store_plain(out, x, inside, out_dim, 2 * PAIRS, D, REST)
        if VALUES:
            x = load_plain(values + head * in_head + in_rows, inside, in_dim, 0, D, W)
            if SCALED_V:
                dims = tl.arange(0, W)[None, :]
                x *= scales(value_scale, scale_row, tokens, count, inside, dims, D, SCALED_V)
            if OFFSET:
                y = load_plain(offset_values + head * offset_head + offset_rows, changed, offset_dim, 0, D, W)
                if FACTOR:
                    y *= factor_v
                x += y
            store_plain(out_values + head * out_head + out_rows, x, inside, out_dim, 0, D, W)
