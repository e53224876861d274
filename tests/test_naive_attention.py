"""Naive attention against whole-row softmax in float64, and its roundings against what they mean."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from harness.errors import UsageError

torch = pytest.importorskip("torch")

from harness.engine.naive_attention import NaiveAttention, _Layer, attend  # noqa: E402
from harness.rounding import through  # noqa: E402

PLAIN = _Layer(scale=1.0, soft_cap=0.0, window=-1)


def inputs(
    tokens: int, keys: int, heads: int = 6, groups: int = 2, size: int = 16, seed: int = 0
) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, heads, size, generator=generator) * 0.7,
        torch.randn(groups, keys, size, generator=generator),
        torch.randn(groups, keys, size, generator=generator),
    )


def oracle(query: Any, keys: Any, values: Any, layer: _Layer = PLAIN, hidden: Any = None) -> Any:
    """Whole rows, f64: no blocks, no running maximum."""
    tokens, heads, _ = query.shape
    repeat = heads // keys.shape[0]
    k, v = (t.double().repeat_interleave(repeat, 0) for t in (keys, values))
    scores = torch.einsum("thd,hnd->htn", query.double(), k)
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    index = torch.arange(keys.shape[1] - tokens, keys.shape[1])[:, None]
    key_index = torch.arange(keys.shape[1])
    mask = key_index > index
    if layer.window >= 0:
        mask = mask | (key_index <= index - layer.window)
    if hidden is not None:
        mask = mask | hidden(index, key_index, tokens)
    return torch.einsum("htn,hnd->thd", scores.masked_fill(mask, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("tokens", "keys", "block", "parts"),
    [
        *itertools.product((1, 5, 150), (150, 301), (1, 16, 64), (1, 4)),
        (1, 1, 64, 1),
        (3, 3, 2, 1),
    ],
)
def test_it_is_softmax_attention(tokens: int, keys: int, block: int, parts: int) -> None:
    query, k, v = inputs(tokens, keys)
    ours = attend(query, k, v, PLAIN, NaiveAttention(block=block, parts=parts))
    torch.testing.assert_close(ours.double(), oracle(query, k, v), rtol=0, atol=5e-6)


@pytest.mark.parametrize("layer", [_Layer(scale=1, soft_cap=2.0, window=-1), _Layer(scale=1, soft_cap=0, window=37)])
@pytest.mark.parametrize("tokens", [1, 140])
def test_soft_cap_and_window(layer: _Layer, tokens: int) -> None:
    query, k, v = inputs(tokens, 200)
    torch.testing.assert_close(
        attend(query, k, v, layer, NaiveAttention()).double(), oracle(query, k, v, layer), rtol=0, atol=5e-6
    )


def test_hidden_keys() -> None:
    def hide(queries: Any, keys: Any, tokens: int) -> Any:
        return (keys % 50 == 49) & (keys // 50 < queries // 50)

    query, k, v = inputs(140, 200)
    ours = attend(query, k, v, PLAIN, NaiveAttention(hide=hide))
    torch.testing.assert_close(ours.double(), oracle(query, k, v, hidden=hide), rtol=0, atol=5e-6)


def test_a_row_without_keys_gives_zeros() -> None:
    query, k, v = inputs(2, 2)
    ours = attend(query, k, v, PLAIN, NaiveAttention(hide=lambda q, keys, _: (keys >= 0) & (q == 0)))
    assert bool((ours[0] == 0).all())
    assert bool(ours[1].abs().sum() > 0)


@pytest.mark.parametrize("form", ["bf16", "e4m3", "e4m3x448"])
def test_p_is_rounded_against_the_running_maximum_and_summed_unrounded(form: str) -> None:
    """One row, block by block, as written down in words."""
    query, k, v = inputs(1, 130, heads=1, groups=1)
    block = 32
    scores = (k[0] @ query[0, 0]).tolist()
    maximum, total, output = -math.inf, 0.0, torch.zeros(16, dtype=torch.float64)
    for start in range(0, 130, block):
        part = torch.tensor(scores[start : start + block])
        higher = max(maximum, float(part.max()))
        fade = math.exp(maximum - higher)
        p = torch.exp(part - higher)
        total = total * fade + float(p.double().sum())
        output = output * fade + through(p, form).double() @ v[0, start : start + block].double()
        maximum = higher
    ours = attend(query, k, v, PLAIN, NaiveAttention(round_p=form, block=block))
    torch.testing.assert_close(ours[0, 0].double(), output / total, rtol=0, atol=5e-6)


def test_prefill_and_decode_round_alike() -> None:
    """Tiles and spans are a matter of speed: a row's roundings depend on the block size alone."""
    query, k, v = inputs(140, 500)
    options = NaiveAttention(round_p="e4m3", block=32)
    whole = attend(query, k, v, PLAIN, options)
    last = attend(query[-1:], k, v, PLAIN, options)
    torch.testing.assert_close(whole[-1:], last, rtol=0, atol=5e-6)


def test_direct_fp8_loses_mass_and_scaled_fp8_does_not() -> None:
    query, k, _ = inputs(1, 4000, seed=3)
    ones = torch.ones(2, 4000, 16)
    lost = [1 - attend(query, k, ones, PLAIN, NaiveAttention(round_p=f)).mean().item() for f in ("e4m3", "e4m3x448")]
    assert lost[0] > 10 * abs(lost[1])


@pytest.mark.parametrize("options", [{"block": 0}, {"parts": 0}, {"round_p": "f8"}])
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        NaiveAttention(**options)
