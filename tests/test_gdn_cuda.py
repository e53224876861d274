"""The hooks of GDN patches on vLLM's CUDA path, as far as a CPU can show: layers of the same interface, no device.

What is shown: every patch takes hold of `_forward_core` and lets go of it; a step that decodes asks nothing of the
device that would wait for it (such a question raises under torch's fake tensors); other metadata reaches the layer
through the forward context; states keep one orientation. That the kernels answer as expected needs a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engine.gdn import Core, Run, describe_layer, gdn_layers, recurrent_states, wrap_core
from harness.engine.gdn_kernels import PIECE, prefill_in_pieces, without_qk_norm
from harness.errors import PatchError
from harness.patching import Hooks, LoadedPatch, list_patches
from harness.sites import RECURRENT

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

PATCHES = [p for p in list_patches() if p.patch.site.startswith(RECURRENT) and p.function is not None]
DISTINCT = [p for p in PATCHES if p.patch.site != "gdn.state" or p.patch.name.endswith(("_4_bits", "_e4m3"))]
SLOTS, HEADS, SIZE, WIDTH, CHANNELS = 6, 2, 4, 4, 24


class Kernel:
    """In place of vLLM's `ChunkGatedDeltaRule`: the state gathers v, token by token."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self._forward_method = self.forward

    def forward(self, *, v: Any, initial_state: Any, cu_seqlens: Any, **_: Any) -> tuple[Any, Any]:
        starts = cu_seqlens.tolist()
        self.calls.append(starts[-1])
        outs, states = [], []
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            gathered = initial_state[row, :, 0] + v[0, start:stop].cumsum(0)
            outs.append(gathered)
            states.append(gathered[-1][:, None].expand_as(initial_state[row]))
        return torch.cat(outs)[None], torch.stack(states)


class Layer:
    """A GDN layer's interface. Its core: state <- state / 2 + a; the window takes the newest input."""

    def __init__(self, context: Any, prefix: str) -> None:
        self.prefix, self.context = prefix, context
        self.kv_cache = (torch.randn(SLOTS, WIDTH - 1, CHANNELS), torch.randn(SLOTS, HEADS, SIZE, SIZE))
        self.A_log, self.dt_bias, self.conv1d = torch.ones(HEADS), torch.ones(HEADS), None
        self.activation, self.norm = "silu", SimpleNamespace(norm_before_gate=True)
        self.gdn_prefill_backend, self.chunk_gated_delta_rule = "triton", Kernel()
        self.seen: list[Any] = []

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        metadata = self.context.attn_metadata[self.prefix]
        self.seen.append(metadata)
        count = metadata.num_decodes
        slots = metadata.non_spec_state_indices_tensor[:count].long()
        windows, states = self.kv_cache
        states[slots] = states[slots] / 2 + a[:count, :, None, None]
        windows[slots] = torch.cat((windows[slots][:, 1:], mixed_qkv[:count, None]), 1)
        core_attn_out[:count] = states[slots].sum(-1)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Whatever imports the function by name does so now: later it would keep the stand-in for good.
    import vllm.forward_context
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn

    found = SimpleNamespace(attn_metadata={})
    monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda: found)
    return found


def runner_with(context: Any) -> tuple[Any, list[Layer]]:
    layers = [Layer(context, f"layers.{i}") for i in range(2)]
    model = SimpleNamespace(modules=lambda: iter([SimpleNamespace(), *layers]))
    return SimpleNamespace(device=SimpleNamespace(type="cuda"), get_model=lambda: model), layers


def metadata(decodes: int, prefills: int, continues: tuple[bool, ...] = ()) -> Any:
    lengths = [1] * decodes + [3] * prefills
    flags = torch.tensor([True] * decodes + list(continues)) if prefills else None
    return SimpleNamespace(
        num_decodes=decodes,
        num_prefills=prefills,
        non_spec_state_indices_tensor=torch.arange(1, 1 + decodes + prefills, dtype=torch.int32),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        has_initial_state=flags,
        prefill_has_initial_state=None if flags is None else flags[decodes:],
    )


def step(layer: Layer, what: Any) -> Any:
    """One step of a layer; its output [T, H, SIZE]."""
    tokens = what.num_decodes + 3 * what.num_prefills
    generator = torch.Generator().manual_seed(1)
    mixed, a, b = (torch.randn(tokens, n, generator=generator) for n in (CHANNELS, HEADS, HEADS))
    out = torch.zeros(tokens, HEADS, SIZE)
    layer.context.attn_metadata[layer.prefix] = what
    layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=out)
    return out


@pytest.fixture
def applied(context: Any, request: pytest.FixtureRequest) -> Iterator[tuple[LoadedPatch, Any, Layer]]:
    patch: LoadedPatch = request.param
    runner, layers = runner_with(context)
    before = [(vars(layer).copy(), layer.A_log.clone(), layer.dt_bias.clone()) for layer in layers]
    done = patch.apply(runner)
    yield patch, done, layers[0]
    done.undo()
    for layer, (attributes, rate, bias) in zip(layers, before, strict=True):
        assert vars(layer) == attributes, "the undo left something on a layer"
        assert torch.equal(layer.A_log, rate)
        assert torch.equal(layer.dt_bias, bias)
        assert layer.norm.norm_before_gate is True
        assert layer.chunk_gated_delta_rule._forward_method == layer.chunk_gated_delta_rule.forward


@pytest.mark.parametrize("applied", DISTINCT, ids=lambda p: p.patch.name, indirect=True)
def test_a_step_that_decodes_never_waits_for_the_device(applied: tuple[LoadedPatch, Any, Layer]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, _, layer = applied
    stored = layer.kv_cache
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer.kv_cache = tuple(mode.from_tensor(t) for t in stored)
            for _ in range(9):  # the longest rhythm of a patch is eight steps
                step(layer, metadata(decodes=3, prefills=0))
    finally:
        layer.kv_cache = stored


def test_asking_the_device_is_noticed() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(Exception, match=r"item|_local_scalar_dense"):
        bool(torch.ones(2).any())


def test_rounding_touches_the_decoding_slots_alone(context: Any) -> None:
    runner, layers = runner_with(context)
    plain, rounded = layers
    rounded.kv_cache = tuple(t.clone() for t in plain.kv_cache)
    before = plain.kv_cache[1].clone()
    step(plain, metadata(decodes=2, prefills=1, continues=(True,)))
    (patch,) = [p for p in PATCHES if p.patch.name == "gdn_state_decode_4_bits"]
    done = patch.apply(runner)
    step(rounded, metadata(decodes=2, prefills=1, continues=(True,)))
    fired = done.fired
    done.undo()
    changed = (rounded.kv_cache[1] != plain.kv_cache[1]).flatten(1).any(1)
    assert changed.tolist() == [False, True, True, False, False, False]
    assert torch.equal(rounded.kv_cache[1][3:], before[3:])
    relative = (rounded.kv_cache[1] / plain.kv_cache[1] - 1).abs().max()
    assert 2**-7 < relative <= 2**-5  # half a unit of the fourth bit
    assert fired == 1


def test_other_metadata_reaches_the_layer_and_is_put_back(context: Any) -> None:
    runner, (layer, _) = runner_with(context)
    hooks = Hooks()

    def change(core: Core, run: Run) -> bool:
        run(core.resuming_all())
        return True

    wrap_core(hooks, runner, change)
    what = metadata(decodes=1, prefills=2, continues=(False, True))
    step(layer, what)
    assert layer.seen[0] is not what
    assert layer.seen[0].has_initial_state.tolist() == [True, True, True]
    assert layer.seen[0].prefill_has_initial_state.tolist() == [True, True]
    assert what.has_initial_state.tolist() == [True, False, True]
    assert context.attn_metadata[layer.prefix] is what
    hooks()
    step(layer, what)
    assert layer.seen[1] is what


def test_a_profiling_run_is_left_alone(context: Any) -> None:
    runner, (layer, _) = runner_with(context)
    hooks = Hooks()
    called: list[Any] = []
    layer._forward_core = lambda **kwargs: called.append(kwargs)  # type: ignore[method-assign]
    wrap_core(hooks, runner, lambda core, run: pytest.fail("a profiling run has no requests to change"))
    context.attn_metadata = None
    layer._forward_core(mixed_qkv=None, b=None, a=None, core_attn_out=None)
    assert len(called) == 1
    assert hooks.fired == 0


def test_prefill_in_pieces_is_the_same_and_is_changed_between_them(context: Any) -> None:
    runner, (layer, _) = runner_with(context)
    lengths = (PIECE + 6, 10)
    v = torch.randn(1, sum(lengths), HEADS, SIZE, dtype=torch.float64)
    starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    states = torch.zeros(2, HEADS, SIZE, SIZE, dtype=torch.float64)
    call = {"q": v, "k": v, "v": v, "g": v, "beta": v, "initial_state": states, "cu_seqlens": starts}
    call |= {"chunk_indices": torch.zeros(3, 2, dtype=torch.int32), "chunk_offsets": torch.zeros(3, dtype=torch.int32)}
    whole, final = layer.chunk_gated_delta_rule._forward_method(**call)
    for factor in (1.0, 0.0):
        hooks = Hooks()
        prefill_in_pieces(hooks, runner, functools.partial(torch.mul, other=factor))
        layer.chunk_gated_delta_rule.calls.clear()
        out, last = layer.chunk_gated_delta_rule._forward_method(**call)
        hooks()
        assert layer.chunk_gated_delta_rule.calls == [PIECE, 6, 10]
        torch.testing.assert_close(last, final * factor)
        same = torch.isclose(out, whole).flatten(2).all(-1)[0]
        assert same.all() if factor else same.tolist() == [True] * PIECE + [False] * 6 + [True] * 10


def test_kernels_of_other_interfaces_are_refused(context: Any) -> None:
    runner, (layer, _) = runner_with(context)
    layer.gdn_prefill_backend = "cutedsl"
    with pytest.raises(PatchError, match="gdn-prefill-backend"):
        prefill_in_pieces(Hooks(), runner, lambda state: state)


def test_a_model_without_such_layers_is_refused() -> None:
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: iter([SimpleNamespace()])))
    with pytest.raises(PatchError, match="hybrid"):
        gdn_layers(runner)


@pytest.mark.parametrize("prefill", [False, True])
def test_the_norm_of_queries_and_keys_is_an_option_of_every_kernel(
    context: Any, prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    options = {
        "fused_recurrent_gated_delta_rule_packed_decode": "use_qk_l2norm_in_kernel",
        "fused_sigmoid_gating_delta_rule_update": "use_qk_l2norm_in_kernel",
        "fused_post_conv_prep": "apply_l2norm",
    }
    for name in options:
        monkeypatch.setattr(module, name, lambda **kwargs: kwargs)
    hooks = Hooks()
    without_qk_norm(hooks, runner_with(context)[0], prefill=prefill)
    values = [getattr(module, name)(**{option: True})[option] for name, option in options.items()]
    assert values == [False, False, not prefill]
    assert hooks.fired == (3 if prefill else 2)
    hooks()
    assert [getattr(module, name)(**{option: True})[option] for name, option in options.items()] == [True] * 3


def test_states_have_one_orientation() -> None:
    """[slots, H, K, V], where a CUDA device keeps [slots, H, V, K] and the CPU's shape says so without being so."""
    key, value = 3, 5

    class OnDevice:
        device = SimpleNamespace(type="cuda")

        def transpose(self, first: int, second: int) -> Any:
            return torch.zeros(SLOTS, HEADS, value, key).transpose(first, second)

    assert recurrent_states(SimpleNamespace(kv_cache=(None, OnDevice()))).shape == (SLOTS, HEADS, key, value)
    memory = torch.randn(SLOTS, HEADS, key, value)
    shown = SimpleNamespace(kv_cache=(None, memory.view(SLOTS, HEADS, value, key)))
    assert torch.equal(recurrent_states(shown), memory)
    recurrent_states(shown)[0] = 0
    assert not memory[0].any()


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", "Layer (CPU, state float32)"), ("cuda", "Layer (prefill triton, decode CPU, state float32)")],
)
def test_a_build_says_what_a_layer_keeps_its_state_in(context: Any, device: str, expected: str) -> None:
    layer = Layer(context, "layers.0")
    layer.kv_cache = (None, SimpleNamespace(device=SimpleNamespace(type=device), dtype=torch.float32))
    layer.gdn_decode_kernel = "CPU"  # type: ignore[attr-defined]
    assert describe_layer(layer) == expected
