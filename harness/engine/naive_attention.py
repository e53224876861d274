"""Block-wise attention in plain torch in place of the engine's kernel: f32 inside, every rounding a choice.

The reference shape of a flash kernel: keys are visited in blocks of a fixed size with a running maximum, P is the
unnormalised exp(score - running maximum) in [0, 1], the row sum uses P before it is rounded. What a block size means
for rounding, and the merging of KV parts by their log-sum-exp, is therefore explicit and can be made wrong on purpose.

It replaces `forward` and the cache write of each attention layer's own implementation, so it runs inside vLLM's opaque
attention op, with or without compilation, and shares the engine's cache allocation in a plain layout of its own:
key beside value in each slot. A cache written by one is not readable by the other, so requests must not live across
installing or removing it (the engine's prefix cache has to be reset).

Shape legend: T tokens of a step, H query heads, J KV heads, G = H / J, D head size, R query rows of one KV head
(G times the tile's tokens), N keys, S keys of a span, B keys of a block, C blocks of a span, M parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from harness.errors import PatchError, UsageError
from harness.patching import Hooks
from harness.rounding import parse_format, through
from harness.sites import attention_layers

TILE = 128  # query tokens computed together in prefill; no influence on rounding
SPAN = 1 << 17  # scores held at once per KV head; no influence on rounding

Hide = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(query indices [R, 1], key indices [S], tokens of the request in this step) -> [R, S] bool, True: hidden."""

Merge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(outputs [M, J, R, D], each normalised; natural log-sum-exps [M, J, R, 1]) -> merged output [J, R, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveAttention:
    """How to attend. The defaults are correct; everything else is a variation or a fault."""

    round_p: str = "f32"  # a format of `harness.rounding`: P before it multiplies V
    round_sum: str = "f32"  # the running output, after each block
    block: int = 64  # B: keys per block of the running maximum
    parts: int = 1  # M: KV parts attended separately and merged by log-sum-exp
    merge: Merge | None = None  # None: softmax of the log-sum-exps
    hide: Hide | None = None  # further keys to hide, beyond causality and the layer's window

    def __post_init__(self) -> None:
        parse_format(self.round_p)
        parse_format(self.round_sum)
        if self.block < 1 or self.parts < 1:
            raise UsageError("NaiveAttention: block and parts must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What the engine's own implementation knows about its layer."""

    scale: float
    soft_cap: float  # 0: none
    window: int  # keys seen, the query's own included; -1: all


def install(runner: Any, options: NaiveAttention) -> Hooks:
    """Replace the attention of every layer; calling the result puts the engine's own back.

    Raises:
        PatchError: a layer has sinks, ALiBi or a quantised KV cache, or is not a decoder's.
    """
    hooks = Hooks()
    for layer in attention_layers(runner):
        impl = layer.impl
        _refuse_unsupported(layer)
        written: set[int] = set()
        hooks.wrap(impl, "do_kv_cache_update", functools.partial(_instead, functools.partial(_write_cache, written)))
        hooks.at_undo(functools.partial(_clean, layer, written))
        forward = _forward(impl, options)
        hooks.wrap(impl, "forward", functools.partial(_instead, forward))
    return hooks


def _instead(replacement: Callable[..., Any], _: Callable[..., Any]) -> Callable[..., Any]:
    return replacement


def _refuse_unsupported(layer: Any) -> None:
    impl = layer.impl
    unsupported = {
        "sinks": getattr(impl, "sinks", None) is not None,
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a quantised KV cache": str(impl.kv_cache_dtype).startswith(("fp8", "int8", "nvfp4")),
        "an attention type other than decoder": impl.attn_type != "decoder",
    }
    if names := [name for name, present in unsupported.items() if present]:
        raise PatchError(f"naive attention cannot stand in for layer {layer.layer_name}: it has {', '.join(names)}")


def _write_cache(
    written: set[int], _: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store key and value [T, J, D] of each token at its slot; cache is [blocks, J, block size, 2 D]; -1 is padding."""
    kept = slots >= 0
    slots = slots[kept].long()
    block_size = cache.shape[2]
    written.update((slots // block_size).unique().tolist())
    both = torch.cat((key[: len(kept)][kept], value[: len(kept)][kept]), dim=-1)
    cache[slots // block_size, :, slots % block_size] = both.to(cache.dtype)


def _clean(layer: Any, written: set[int]) -> None:
    """Zero the blocks written: what they hold means nothing to the engine's kernel, which may let a NaN through."""
    for block in written:
        layer.kv_cache[block].zero_()


def _forward(impl: Any, options: NaiveAttention) -> Callable[..., torch.Tensor]:
    layer = _Layer(scale=impl.scale, soft_cap=float(impl.logits_soft_cap or 0), window=int(impl.sliding_window or -1))

    def forward(
        _: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if metadata is None:  # the engine is warming up
            return output
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            first, last = starts[row], starts[row + 1]
            if last == first:
                continue
            keys, values = _gather(cache, metadata.block_table[row], length)
            tokens = query[first:last].float() * layer.scale
            output[first:last] = attend(tokens, keys, values, layer, options).to(output.dtype)
        return output

    return forward


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request, each [J, N, D] f32."""
    block_size = cache.shape[2]
    blocks = cache[table[: -(-length // block_size)].long()]  # [blocks, J, block size, 2 D]
    rows = blocks.transpose(0, 1).flatten(1, 2)[:, :length].float()
    keys, values = rows.chunk(2, dim=-1)
    return keys.contiguous(), values.contiguous()


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: _Layer, options: NaiveAttention
) -> torch.Tensor:
    """Attention of one request's last T tokens over its N keys.

    Args:
        query: [T, H, D] f32, already multiplied by the softmax scale; token t has index N - T + t.
        keys: [J, N, D] f32.
        values: [J, N, D] f32.
        layer: soft cap and window.
        options: roundings and faults.

    Returns:
        [T, H, D] f32. A token that sees no key gets zeros.
    """
    tokens, heads, _ = query.shape
    groups, count = keys.shape[0], keys.shape[1]
    output = torch.empty_like(query)
    for start in range(0, tokens, TILE):
        tile = query[start : start + TILE]
        indices = torch.arange(len(tile)) + (count - tokens + start)  # of the queries, among the keys
        rows = tile.unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3).flatten(1, 2)  # [J, R, D]
        index = indices.repeat(heads // groups)[:, None]  # [R, 1]
        visible = _Visible(index, tokens, layer.window, options.hide)
        merged = _merged(rows, keys, values, visible, layer, options)
        output[start : start + TILE] = (
            merged.unflatten(1, (heads // groups, len(tile))).permute(2, 0, 1, 3).flatten(1, 2)
        )
    return output


@dataclass(frozen=True, slots=True)
class _Visible:
    """Which keys the rows of a tile see."""

    index: torch.Tensor  # [R, 1] of each query row
    tokens: int  # of the request in this step
    window: int
    hide: Hide | None

    def bounds(self) -> tuple[int, int]:
        """Half-open range of keys that any row sees."""
        low, high = int(self.index[0]), int(self.index[-1])
        return (0 if self.window < 0 else max(0, low - self.window + 1)), high + 1

    def hidden(self, start: int, stop: int) -> torch.Tensor | None:
        """[R, S] bool for keys start to stop, True where hidden; None if all are seen."""
        inside = stop - 1 <= int(self.index[0]) and (self.window < 0 or start > int(self.index[-1]) - self.window)
        if inside and self.hide is None:
            return None
        keys = torch.arange(start, stop)
        hidden = keys > self.index
        if self.window >= 0:
            hidden |= keys <= self.index - self.window
        if self.hide is not None:
            hidden |= self.hide(self.index, keys, self.tokens)
        return hidden


def _merged(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: _Visible,
    layer: _Layer,
    options: NaiveAttention,
) -> torch.Tensor:
    """[J, R, D]: one pass over all keys, or several parts merged by their log-sum-exps."""
    low, high = visible.bounds()
    if options.parts == 1:
        return _attend_range(rows, keys, values, visible, (low, high), layer, options)[0]
    edges = [low + (high - low) * part // options.parts for part in range(options.parts + 1)]
    done = [_attend_range(rows, keys, values, visible, edge, layer, options) for edge in itertools.pairwise(edges)]
    outputs, sums = torch.stack([d[0] for d in done]), torch.stack([d[1] for d in done])
    return (options.merge or merge_by_lse)(outputs, sums)


def merge_by_lse(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """The right way: weights are the softmax of the natural log-sum-exps over the parts."""
    return (outputs * sums.softmax(0).nan_to_num()).sum(0)


def _attend_range(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: _Visible,
    bounds: tuple[int, int],
    layer: _Layer,
    options: NaiveAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [J, R, D] and natural log-sum-exp [J, R, 1] (-inf: no key seen) over a range of keys.

    Blocks are visited in order. Several are computed at once where the tile is small (decode): the running maximum
    is then a cumulative one, and each block keeps its own, so that P is what it would be one block at a time.
    """
    groups, count, size = rows.shape
    output = rows.new_zeros(groups, count, size)
    total = rows.new_zeros(groups, count, 1)
    maximum = rows.new_full((groups, count, 1), -torch.inf)
    span = options.block * (1 if options.round_sum != "f32" else max(1, SPAN // (count * options.block)))
    for start in range(bounds[0], bounds[1], span):
        stop = min(start + span, bounds[1])
        scores = torch.matmul(rows, keys[:, start:stop].transpose(1, 2))
        if layer.soft_cap:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        hidden = visible.hidden(start, stop)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        part, part_total, highest = _span(scores, values[:, start:stop], maximum, options)
        fade = torch.exp(maximum - highest).nan_to_num(nan=0.0)  # NaN: nothing seen yet
        output = through(output * fade + part, options.round_sum)
        total = total * fade + part_total
        maximum = highest
    return output / total.clamp_min(torch.finfo(total.dtype).tiny), maximum + total.log()


def _span(
    scores: torch.Tensor, values: torch.Tensor, maximum: torch.Tensor, options: NaiveAttention
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One span of blocks: its output [J, R, D] and row sum [J, R, 1] against the new running maximum [J, R, 1]."""
    padding = -scores.shape[-1] % options.block
    if padding:
        scores, values = F.pad(scores, (0, padding), value=-torch.inf), F.pad(values, (0, 0, 0, padding))
    blocks = scores.unflatten(-1, (-1, options.block))  # [J, R, C, B]
    running = torch.cummax(torch.cat((maximum, blocks.amax(-1)), -1), -1).values[..., 1:]  # [J, R, C]
    weights = blocks.sub_(running.clamp_min(torch.finfo(scores.dtype).min)[..., None]).exp_()
    highest = running[..., -1:]
    fade = torch.exp(running - highest).nan_to_num(nan=0.0)  # [J, R, C]
    total = (weights.sum(-1) * fade).sum(-1, keepdim=True)
    rounded = through(weights, options.round_p).transpose(1, 2)  # [J, C, R, B]
    products = torch.matmul(rounded, values.unflatten(1, (-1, options.block)))  # [J, C, R, D]
    if products.shape[1] == 1:  # one block: its maximum is the highest
        return products[:, 0], total, highest
    return (products * fade.transpose(1, 2)[..., None]).sum(1), total, highest
