"""The HuggingFace f32 reference of a hybrid model against a float64 recurrence written independently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gdn_oracle import core, layer, relative_error

HYBRID = Path(__file__).parent / "data" / "hybrid"
TOKENS = 200  # three pieces of 64 and a rest
LIMIT = 1e-5

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Seen:
    """Input and output of each GDN layer in one f32 forward, and the states it leaves."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32)
        self.inputs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(HYBRID)
        ids = tokenizer(Path(__file__).read_text(), return_tensors="pt").input_ids[:, :TOKENS]
        self.indices = [i for i, kind in enumerate(self.model.config.layer_types) if kind == "linear_attention"]
        for i in self.indices:
            self.layer(i).register_forward_hook(self._keep(i), with_kwargs=True)
        with torch.no_grad():
            self.cache = self.model(input_ids=ids, use_cache=True).past_key_values

    def layer(self, index: int) -> Any:
        return self.model.model.layers[index].linear_attn

    def weights(self, index: int) -> dict[str, Any]:
        return {name: p.detach().double().numpy() for name, p in self.layer(index).named_parameters()}

    def _keep(self, index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.inputs[index] = (args[0] if args else kwargs["hidden_states"])[0].double().numpy()
            self.outputs[index] = output[0].double().numpy()

        return hook


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


def test_every_layer_agrees_with_the_recurrence(seen: Seen) -> None:
    assert len(seen.indices) == 6
    for index in seen.indices:
        expected, state = layer(seen.inputs[index], seen.weights(index), seen.model.config)
        assert len(expected) == TOKENS
        assert relative_error(seen.outputs[index], expected) < LIMIT
        found = seen.cache.layers[index].recurrent_states[0]
        assert relative_error(found[0].numpy(), state) < LIMIT


def test_the_comparison_can_fail(seen: Seen) -> None:
    """A decay rate off by 1 % in one head is seen where that head remembers."""
    index = seen.indices[3]
    weights = seen.weights(index)
    weights["A_log"] = weights["A_log"] + np.array([1e-2, 0, 0, 0])
    wrong, state = layer(seen.inputs[index], weights, seen.model.config)
    assert relative_error(seen.outputs[index], wrong) > 10 * LIMIT
    assert relative_error(seen.cache.layers[index].recurrent_states[0][0].numpy(), state) > 10 * LIMIT


def test_the_recurrence_goes_on_from_where_it_stopped() -> None:
    generator = np.random.default_rng(0)
    tokens, heads, size, width = 9, 2, 4, 4
    weights = {"conv1d": generator.normal(size=(3 * heads * size, width)), "A_log": np.zeros(heads)}
    weights["dt_bias"] = np.ones(heads)
    mixed, a, b = (generator.normal(size=(tokens, n)) for n in (3 * heads * size, heads, heads))
    nothing = np.zeros((heads, size, size)), np.zeros((3 * heads * size, width - 1))
    whole = core(mixed, a, b, weights, *nothing)
    first = core(mixed[:5], a[:5], b[:5], weights, *nothing)
    second = core(mixed[5:], a[5:], b[5:], weights, first.state, first.window)
    np.testing.assert_allclose(np.concatenate([first.out, second.out]), whole.out, rtol=1e-12)
    np.testing.assert_allclose(second.state, whole.state, rtol=1e-12)
    np.testing.assert_array_equal(second.window, mixed[-3:].T)
