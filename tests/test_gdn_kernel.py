"""vLLM's CPU kernels of a GDN layer's core, called without an engine: against the float64 recurrence, and patched.

Bounds are twice what was measured. Inside, the convolution's output is rounded to bf16 (2^-9 relative), and the decode
kernel keeps the state in whatever dtype the pool has.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.engine.gdn import conv_states, recurrent_states
from harness.engine.gdn_kernels import prefill_in_pieces
from harness.patching import Hooks, LoadedPatch, list_patches
from harness.sites import RECURRENT
from tests.gdn_oracle import Recurrence, core, relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

HEADS, SIZE, WIDTH = 2, 64, 4
CHANNELS = 3 * HEADS * SIZE
PROMPT, DECODED = 150, 40
SLOT = 3
LIMIT = 1.1e-2  # relative; measured 5.4e-3 in prefill, 3.5e-3 in decode, 3.8e-3 in the state (5.5e-3 if bf16)


def layer_of(state_dtype: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Parameters and states as a loaded layer has them, and the parameters for the oracle."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(CHANNELS, 1, WIDTH, generator=generator) / 2).bfloat16()
    rate, bias = torch.tensor([-2.9, -1.1]), torch.tensor([0.5, -0.5]).bfloat16()
    plain = {"conv1d": weight[:, 0], "A_log": rate, "dt_bias": bias}
    packed = ops.causal_conv1d_weight_pack(weight.view(CHANNELS, WIDTH)) if cpp_convolution() else weight
    layer = SimpleNamespace(
        prefix="layer",
        conv1d=SimpleNamespace(weight=packed, bias=None),
        activation="silu",
        A_log=rate,
        dt_bias=bias,
        kv_cache=(
            torch.randn(5, WIDTH - 1, CHANNELS).bfloat16(),
            torch.randn(5, HEADS, SIZE, SIZE).to(state_dtype),
        ),
        norm=SimpleNamespace(norm_before_gate=True),
        tp_size=1,
        key_dim=HEADS * SIZE,
        value_dim=HEADS * SIZE,
        head_k_dim=SIZE,
        head_v_dim=SIZE,
    )
    layer.rearrange_mixed_qkv = lambda mixed: QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, mixed)
    return layer, {name: value.double().numpy() for name, value in plain.items()}


def cpp_convolution() -> bool:
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import is_arm_bf16

    return bool(torch.cpu._is_avx512_bf16_supported() or is_arm_bf16())


def metadata(decodes: int, prompts: Sequence[int] = (), continues: Sequence[bool] = ()) -> Any:
    """A step's requests: the first in slot `SLOT`, a second in slot 1."""
    lengths = [1] * decodes + list(prompts)
    return SimpleNamespace(
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=len(prompts),
        num_prefill_tokens=sum(prompts),
        non_spec_state_indices_tensor=torch.tensor([SLOT, 1][: len(lengths)], dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        has_initial_state=torch.tensor([True] * decodes + list(continues)),
        prefill_has_initial_state=None,
        spec_sequence_masks=None,
        num_accepted_tokens=None,
    )


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(1)
    total = PROMPT + DECODED
    return tuple(torch.randn(total, n, generator=generator).bfloat16() for n in (CHANNELS, HEADS, HEADS))


def engine_core(layer: Any, steps: list[int]) -> Recurrence:
    """The layer's core over the inputs, in steps of so many tokens."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    mixed, a, b = inputs()
    outs, start = [], 0
    for count in steps:
        rows = slice(start, start + count)
        out = torch.zeros(count, HEADS, SIZE).bfloat16()
        what = metadata(1) if count == 1 else metadata(0, [count], [start > 0])
        gdn_attention._cpu_gdn_attention_nonspec(layer, what, mixed[rows], b[rows], a[rows], out)
        outs.append(out)
        start += count
    state, window = recurrent_states(layer)[SLOT], conv_states(layer)[SLOT]
    return Recurrence(*(t.double().numpy() for t in (torch.cat(outs), state, window)))


def expected(weights: dict[str, np.ndarray], tokens: int) -> Recurrence:
    mixed, a, b = (x[:tokens].double().numpy() for x in inputs())
    return core(mixed, a, b, weights, np.zeros((HEADS, SIZE, SIZE)), np.zeros((CHANNELS, WIDTH - 1)))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_prefill_and_decode_follow_the_recurrence(state_dtype: str) -> None:
    layer, weights = layer_of(getattr(torch, state_dtype))
    found = engine_core(layer, [PROMPT] + [1] * DECODED)
    true = expected(weights, PROMPT + DECODED)
    assert relative_error(found.out[:PROMPT], true.out[:PROMPT]) < LIMIT
    assert relative_error(found.out[PROMPT:], true.out[PROMPT:]) < LIMIT
    assert relative_error(found.state, true.state) < LIMIT
    np.testing.assert_array_equal(found.window, true.window)


def test_states_of_other_requests_are_left_alone() -> None:
    layer, _ = layer_of(torch.float32)
    before = [t.clone() for t in layer.kv_cache]
    engine_core(layer, [PROMPT, 1])
    for now, then in zip(layer.kv_cache, before, strict=True):
        changed = (now != then).flatten(1).any(1)
        assert changed.tolist() == [slot == SLOT for slot in range(5)]


def test_the_state_is_seen_the_right_way_round() -> None:
    layer, weights = layer_of(torch.float32)
    found = engine_core(layer, [PROMPT])
    state = expected(weights, PROMPT).state
    assert relative_error(found.state, state) < LIMIT
    assert relative_error(found.state.swapaxes(1, 2), state) > 0.5


def test_prefill_in_pieces_of_64_tokens_is_the_same_to_the_bit() -> None:
    whole = engine_core(layer_of(torch.float32)[0], [PROMPT])
    hooks = Hooks()
    layer = layer_of(torch.float32)[0]
    prefill_in_pieces(hooks, runner_with(layer), lambda state: state)
    try:
        pieces = engine_core(layer, [PROMPT])
    finally:
        hooks()
    assert hooks.fired == 1
    np.testing.assert_array_equal(pieces.out, whole.out)
    np.testing.assert_array_equal(pieces.state, whole.state)


# --------------------------------------------------------------------------- patches

STEPS = 16
IN_THE_CORE = [
    p
    for p in list_patches()
    if p.patch.site.startswith(RECURRENT) and p.function is not None and p.patch.name != "gdn_norm_after_gate"
]
# Seven bits are bf16, and states as large as these have f16's ten bits.
SAME = {"bf16": "7_bits", "f16": "10_bits"}


class Served(NamedTuple):
    """What a core gave: outputs [T, H, V] by kind of step, and the states of both slots, as bytes would compare."""

    prefill: np.ndarray
    decode: np.ndarray
    states: np.ndarray


def runner_with(layer: Any) -> Any:
    model = SimpleNamespace(modules=lambda: iter([layer]))
    return SimpleNamespace(device=torch.device("cpu"), get_model=lambda: model)


def serve(layer: Any) -> Served:
    """A prompt in three chunks, a short one beside the last, then steps of both; slots hold old states before."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    generator = torch.Generator().manual_seed(5)
    for pool in layer.kv_cache:
        pool.copy_(torch.randn(pool.shape, generator=generator))
    chunks = [metadata(0, [128], [False]), metadata(0, [128], [True]), metadata(0, [34, 20], [True, False])]
    outs = []
    for what in [*chunks, *[metadata(2)] * STEPS]:
        tokens = what.num_decode_tokens + what.num_prefill_tokens
        mixed, a, b = (torch.randn(tokens, n, generator=generator).bfloat16() for n in (CHANNELS, HEADS, HEADS))
        out = torch.zeros(tokens, HEADS, SIZE).bfloat16()
        gdn_attention._cpu_gdn_attention_nonspec(layer, what, mixed, b, a, out)
        outs.append(out.float().numpy())
    return Served(np.concatenate(outs[:3]), np.concatenate(outs[3:]), layer.kv_cache[1][[1, SLOT]].numpy())


def alike(a: Served, b: Served) -> list[bool]:
    return [x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)]


@pytest.fixture(scope="module")
def layer() -> Any:
    return layer_of(torch.float32)[0]


@pytest.fixture(scope="module")
def stock(layer: Any) -> Served:
    return serve(layer)


@pytest.fixture(scope="module")
def seen() -> dict[bytes, str]:
    """Outputs already given by a patch, and its name."""
    return {}


@pytest.mark.parametrize("patch", IN_THE_CORE, ids=lambda p: p.patch.name)
def test_patch_changes_what_it_says_and_is_undone(
    patch: LoadedPatch, layer: Any, stock: Served, seen: dict[bytes, str]
) -> None:
    applied = patch.apply(runner_with(layer))
    try:
        changed = serve(layer)
        fired = applied.fired
    finally:
        applied.undo()
    assert alike(stock, serve(layer)) == [True, True, True], "the undo left something behind"
    assert fired, "none of its hooks had anything to do"
    if not patch.patch.changes_rows:
        assert alike(stock, changed) == [True, True, True]
        return
    assert alike(stock, changed) == [patch.patch.phase == "decode", False, False]
    where, _, form = patch.patch.name.rpartition("_")
    name = f"{where}_{SAME.get(form, form)}"
    key = changed.prefill.tobytes() + changed.decode.tobytes()
    assert seen.setdefault(key, name) == name, "two patches give the same rows"
    if patch.patch.kind == "benign":
        assert np.abs(changed.decode - stock.decode).max() < 0.01 * np.abs(stock.decode).max()
