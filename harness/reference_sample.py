"""A corpus of the reference's own answers to a target task: sampled in f32 from the user's prompts, exact ids kept.

Prefixes sampled by the reference are what a bound on the task score averages KL over, so the distribution sampled
from is exactly softmax(logits / temperature) cut to its nucleus: no other processor, whatever the checkpoint asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.corpus import load_tokenizer, seal, tokenizer_facts
from harness.errors import UsageError
from harness.reference_model import ReferenceModel, Weights, load_model
from harness.types import Corpus, Segment, Source

PREFILL_ROWS = 64  # scored rows before each answer
SMALLEST = 16  # answers below which a corpus is for smoke tests only: as many documents as `embedded` has

Progress = Callable[[int, int], None]
"""Called with (answers done, answers in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question to the model."""

    line: int  # of the file, from 1
    kind: str
    messages: list[dict[str, str]]  # role and content


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a JSONL file: an object a line with `prompt` (text) or `messages`, and optionally `kind`.

    Raises UsageError for a file that cannot be read, is empty, or has a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts file {path} cannot be read: {error}") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UsageError(f"the prompts file {path} has no prompts: expected a JSON object a line")
    return prompts


def sample_corpus(
    model: str,
    prompts: Path,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int = 512,
    seed: int = 0,
    device_map: str | None = None,
    weights: Weights = "original",
    tokenizer_name: str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Answer every prompt once, in HuggingFace f32, and pin prompt and answer as token ids.

    An answer ends with the model's end-of-sequence id, which is kept, or after `max_tokens`. Each has a generator of
    its own, so it does not depend on the other prompts. `depth` is the prompt's length rounded up to a power of two.
    `device_map` and `weights`: see `reference_model.load_model`.
    Raises UsageError for settings out of range, a tokenizer without a chat template, or a prompt that leaves no room.
    """
    if not (temperature > 0 and 0 < top_p <= 1 and max_tokens >= 1):
        raise UsageError(
            f"temperature {temperature}, top-p {top_p}, max-tokens {max_tokens}: expected > 0, within (0, 1] and >= 1"
        )
    asked = read_prompts(prompts)
    tokenizer = load_tokenizer(model)
    rendered = [_render(tokenizer, prompts, prompt) for prompt in asked]
    reference = load_model(model, dtype="float32", device_map=device_map, weights=weights)
    segments: list[Segment] = []
    with reference.arithmetic():
        reference.self_check(rendered[0], longest=0)
        for number, (prompt, ids) in enumerate(zip(asked, rendered, strict=True)):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            answer = list(
                _answer(reference, ids, temperature, top_p, _room(reference, prompt, ids, max_tokens), generator)
            )
            segments.append(_segment(f"{prompt.kind}-{number + 1:04d}", prompt.kind, ids, answer))
            if progress:
                progress(number + 1, len(asked))
    tokenizer_sha256, vocab_size, pieces = tokenizer_facts(tokenizer)
    return seal(
        Corpus(
            name=f"sampled-{prompts.stem}",
            version="1",
            tokenizer=tokenizer_name or Path(model).name,
            tokenizer_sha256=tokenizer_sha256,
            vocab_size=vocab_size,
            bos="as the chat template has it",
            smoke=len(segments) < SMALLEST,
            segments=tuple(segments),
            sources=tuple(_sources(prompts, segments, asked)),
            sampling={"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed},
            pieces=pieces,
        )
    )


def draw(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from softmax(logits / temperature), cut to the fewest likeliest ids that hold `top_p`. [V] -> int."""
    chances, ids = torch.softmax(logits.double().cpu() / temperature, dim=0).sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    kept = torch.where(before < top_p, chances, 0.0)
    return int(ids[torch.multinomial(kept, 1, generator=generator)])


def _answer(
    reference: ReferenceModel,
    prompt: NDArray[np.int32],
    temperature: float,
    top_p: float,
    most: int,
    generator: torch.Generator,
) -> Iterator[int]:
    network = reference.network
    ends = network.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    ids, cache = prompt.tolist(), None
    for _ in range(most):
        fed = torch.tensor([ids], dtype=torch.int64, device=reference.device)
        output = network.base_model(input_ids=fed, past_key_values=cache, use_cache=True)
        token = draw(reference.logits(output.last_hidden_state[0, -1:])[0], temperature, top_p, generator)
        yield token
        if token in stops:
            return
        ids, cache = [token], output.past_key_values


def _segment(name: str, kind: str, prompt: NDArray[np.int32], answer: Sequence[int]) -> Segment:
    length = len(prompt)
    return Segment(
        id=name,
        document=name,
        kind=kind,
        depth=1 << (length - 1).bit_length(),
        token_ids=np.concatenate([prompt, np.array(answer, np.int32)]),
        decode_from=length,
        windows=((max(0, length - PREFILL_ROWS), length),),
    )


def _sources(path: Path, segments: Sequence[Segment], prompts: Sequence[Prompt]) -> Iterator[Source]:
    for segment, prompt in zip(segments, prompts, strict=True):
        text = json.dumps(prompt.messages, sort_keys=True).encode()
        origin = f"{path.name}:{prompt.line}, answered by the reference"
        digest = hashlib.sha256(text).hexdigest()
        yield Source(document=segment.document, origin=origin, licence="the user's own", sha256=digest)


def _room(reference: ReferenceModel, prompt: Prompt, ids: NDArray[np.int32], most: int) -> int:
    context = getattr(reference.network.config, "max_position_embeddings", None) or len(ids) + most
    if len(ids) >= context:
        raise UsageError(f"the prompt on line {prompt.line} has {len(ids)} tokens, the model's context is {context}")
    return min(most, context - len(ids))


def _render(tokenizer: Any, path: Path, prompt: Prompt) -> NDArray[np.int32]:
    try:
        text = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs and raise what they like
        raise UsageError(f"{path}:{prompt.line}: the chat template cannot take this prompt: {error}") from error
    # The template writes the special ids itself: adding them again would double the BOS.
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _parse(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}:{number}"
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise UsageError(f'{where}: expected an object with either "prompt" or "messages"')
    messages = given.get("messages", [{"role": "user", "content": given.get("prompt")}])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise UsageError(f"{where}: messages are objects with the texts `role` and `content`")
    return Prompt(line=number, kind=str(given.get("kind", "answer")), messages=messages)


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(key), str) for key in ("role", "content"))
