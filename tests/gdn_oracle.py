"""The gated delta rule in float64 numpy, one token at a time, from its equations. Shares no code with any engine.

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q / sqrt(K)

Legend: T tokens, D channels, W width of the convolution, H value heads, J key heads, K and V sizes of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPS = 1e-6  # under the square root of the L2 norms


class Recurrence(NamedTuple):
    """What a stretch of tokens gives."""

    out: Array  # [T, H, V]
    state: Array  # [H, K, V] after the last token
    window: Array  # [D, W - 1] last inputs of the convolution


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def core(
    mixed: Array, a: Array, b: Array, weights: Mapping[str, Array], state: Array, window: Array, *, eps: float = EPS
) -> Recurrence:
    """Convolution and recurrence over mixed [T, D], a and b [T, H], from a state [H, K, V] and window [D, W - 1].

    `weights` has conv1d [D, W], A_log and dt_bias [H]. Channels of `mixed` are queries, keys, values.
    """
    heads, key, value = state.shape
    state = state.copy()
    inputs = np.concatenate([window.T, mixed])  # [W - 1 + T, D]
    width = weights["conv1d"].shape[1]
    convolved = silu(sum(inputs[i : i + len(mixed)] * weights["conv1d"][:, i] for i in range(width)))
    keys = (mixed.shape[1] - heads * value) // (2 * key)
    q, k, v = np.split(convolved, [keys * key, 2 * keys * key], axis=1)
    q, k = (np.repeat(x.reshape(-1, keys, key), heads // keys, axis=1) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + eps) for x in (q, k))
    v = v.reshape(-1, heads, value)
    decay = np.exp(-np.exp(weights["A_log"]) * np.logaddexp(0, a + weights["dt_bias"]))
    beta = sigmoid(b)
    out = np.empty_like(v)
    for t in range(len(mixed)):
        for h in range(heads):
            s = state[h] * decay[t, h]
            s = s + np.outer(k[t, h], beta[t, h] * (v[t, h] - s.T @ k[t, h]))
            out[t, h] = s.T @ q[t, h] / np.sqrt(key)
            state[h] = s
    return Recurrence(out, state, inputs[len(inputs) - width + 1 :].T)


def layer(hidden: Array, weights: Mapping[str, Array], config: Any) -> tuple[Array, Array]:
    """A whole Qwen3-Next GDN layer over hidden [T, hidden size]: its output, and the state [H, K, V] it ends with.

    `weights` by their names in a checkpoint. Queries, keys, values and output gates of a key head lie together.
    """
    tokens, keys, heads = len(hidden), config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    ratio = heads // keys
    packed = (hidden @ weights["in_proj_qkvz.weight"].T).reshape(tokens, keys, -1)
    q, k, v, z = np.split(packed, np.cumsum([key, key, ratio * value]), axis=2)
    b, a = np.split((hidden @ weights["in_proj_ba.weight"].T).reshape(tokens, keys, 2 * ratio), 2, axis=2)
    mixed = np.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=1)
    parameters = {"conv1d": weights["conv1d.weight"][:, 0], "A_log": weights["A_log"], "dt_bias": weights["dt_bias"]}
    width = parameters["conv1d"].shape[1]
    nothing = np.zeros((heads, key, value)), np.zeros((mixed.shape[1], width - 1))
    result = core(mixed, a.reshape(tokens, heads), b.reshape(tokens, heads), parameters, *nothing)
    size = np.sqrt((result.out**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    gated = result.out / size * weights["norm.weight"] * silu(z.reshape(tokens, heads, value))
    return gated.reshape(tokens, -1) @ weights["out_proj.weight"].T, result.state


def relative_error(found: Any, expected: Array) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))
