"""Corpora of the reference's own answers: prompts in, exact token ids out, with how they were drawn.

The bound from KL to a task score holds over prefixes that the reference itself samples at the task's temperature and
top-p, so a corpus for it has to be made this way. Imports torch and transformers; import it only to sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from harness._environment import package_versions
from harness.corpus import load_tokenizer, seal, tokenizer_facts
from harness.corpus_sources import PLAIN_NAME
from harness.embedded import weights_sha256
from harness.errors import UsageError
from harness.reference_model import load_model
from harness.types import Corpus, LogitsDtype, Segment, Source

Progress = Callable[[int, int], None]
"""Called with (answers done, answers in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of the target task."""

    line: int  # in its file, from 1
    kind: str
    messages: tuple[dict[str, str], ...]  # role and content, as chat templates take them


def sample_corpus(
    model: str,
    prompts_file: Path,
    *,
    name: str,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    prefill_rows: int = 128,
    dtype: LogitsDtype = "float32",
    device_map: str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Let a HuggingFace model answer each prompt once, and make a corpus of prompts and answers.

    A segment is a rendered prompt and its answer, the ending id included if one was drawn. Scored are the answer
    (the row that draws its first id is a prefill row, the rest are decode rows) and the `prefill_rows` rows before it.
    Answers are drawn from softmax(logits / temperature) cut to `top_p`, one at a time, with nothing else applied:
    a model's own generation settings (top-k, penalties) are put aside. Temperature 0 is greedy decoding, for which the
    bound does not hold. Prompt i is drawn with the seed `seed + i`; ids are the same again on the same machine and
    versions, and the corpus keeps the ids themselves. `depth` is the prompt's length rounded up to a power of two.

    Raises UsageError for bad prompts or settings, a tokenizer without chat template, and a prompt that leaves no room
    for an answer in the model's context.
    """
    _check_settings(name, max_new_tokens, temperature, top_p, seed, prefill_rows)
    prompts = read_prompts(prompts_file)
    tokenizer = load_tokenizer(model)
    rendered = [_render(tokenizer, prompt, prompts_file) for prompt in prompts]
    reference = load_model(model, dtype=dtype, device_map=device_map, weights="original")
    context = getattr(reference.network.config.get_text_config(), "max_position_embeddings", None)
    for prompt, ids in zip(prompts, rendered, strict=True):
        if context is not None and len(ids) + max_new_tokens > context:
            raise UsageError(
                f"{prompts_file}:{prompt.line}: {len(ids):,} tokens of prompt and {max_new_tokens:,} new ones are more "
                f"than the model's context of {context:,}: shorten the prompt or lower the number of new tokens"
            )
    network = reference.network
    settings = _generation(network, tokenizer, max_new_tokens, temperature, top_p)
    segments = []
    with reference.arithmetic():
        for number, (prompt, ids) in enumerate(zip(prompts, rendered, strict=True)):
            answer = _answer(network, ids, settings, seed + number)
            segments.append(_segment(f"{prompt.kind}-{number + 1:04d}", prompt.kind, ids, answer, prefill_rows))
            if progress is not None:
                progress(number + 1, len(prompts))
    tokenizer_sha256, vocab_size, pieces = tokenizer_facts(tokenizer)
    label = Path(model).name if Path(model).is_dir() else model
    return seal(
        Corpus(
            name=name,
            version="1",
            tokenizer=label,
            tokenizer_sha256=tokenizer_sha256,
            vocab_size=vocab_size,
            bos="as the chat template writes it",
            smoke=False,
            segments=tuple(segments),
            sources=tuple(
                _source(segment, prompt, prompts_file) for segment, prompt in zip(segments, prompts, strict=True)
            ),
            sampling={
                "model": label,
                "weights_sha256": weights_sha256(model),
                "dtype": dtype,
                "device": str(reference.device),
                "temperature": temperature,
                "top_p": top_p,
                "seed": seed,
                "max_new_tokens": max_new_tokens,
                "end_ids": settings.eos_token_id,
                "chat_template_sha256": _sha256(tokenizer.get_chat_template()),
                "packages": package_versions(["torch", "transformers"]),
            },
            pieces=pieces,
        )
    )


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a JSONL file: objects with `prompt` (a string) or `messages` (role and content), and optional `kind`.

    Empty lines are skipped; the kind is "task" where none is given. Raises UsageError, naming the line, for anything
    else: other keys, wrong types, text with lone surrogates (no tokenizer can take it).
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}; expected UTF-8, one JSON object a line") from error
    prompts = tuple(_prompt(line, number, path) for number, line in enumerate(lines, start=1) if line.strip())
    if not prompts:
        raise UsageError(f"{path} holds no prompts: expected one JSON object a line")
    return prompts


def _prompt(line: str, number: int, path: Path) -> Prompt:
    where = f"{path}:{number}"
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise UsageError(f'{where}: expected an object with either "prompt" or "messages"')
    if unknown := sorted(entry.keys() - {"prompt", "messages", "kind"}):
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are prompt, messages and kind")
    messages = entry.get("messages", [{"role": "user", "content": entry.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages must be a list of objects with role and content")
    for message in messages:
        plain = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not plain or not all(isinstance(text, str) for text in message.values()):
            raise UsageError(f"{where}: a prompt is a string, a message an object of two strings, role and content")
        if not message["content"].strip():
            raise UsageError(f"{where}: the {message['role'] or 'message'}'s text is empty: there is nothing to answer")
        if any("\ud800" <= character <= "\udfff" for text in message.values() for character in text):
            raise UsageError(f"{where}: the text has a lone surrogate, which is not a character; mend it")
    kind = entry.get("kind", "task")
    if not isinstance(kind, str) or not PLAIN_NAME.fullmatch(kind):
        raise UsageError(f"{where}: kind is {kind!r}; expected letters, digits and . _ + - only")
    return Prompt(line=number, kind=kind, messages=tuple(messages))


def _check_settings(
    name: str, max_new_tokens: int, temperature: float, top_p: float, seed: int, prefill_rows: int
) -> None:
    if not PLAIN_NAME.fullmatch(name):
        raise UsageError(f"the corpus name {name!r} is not plain: letters, digits and . _ + - only")
    if max_new_tokens < 1 or prefill_rows < 1:
        raise UsageError("max_new_tokens and prefill_rows must be at least 1: the first answer id is drawn by prefill")
    if not (0 <= temperature < float("inf") and 0 < top_p <= 1):
        raise UsageError(f"temperature {temperature} and top_p {top_p}: expected at least 0, and within 0 .. 1")
    if not 0 <= seed < 2**62:
        raise UsageError(f"seed {seed}: expected a number from 0 to 2**62")


def _render(tokenizer: Any, prompt: Prompt, path: Path) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this model's tokenizer has no chat template, so prompts cannot be put as its users put them")
    try:
        ids = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates raise what their authors please
        raise UsageError(f"{path}:{prompt.line}: the chat template refuses the messages: {error}") from error
    if not ids:
        raise UsageError(f"{path}:{prompt.line}: the chat template makes no tokens of the messages")
    return cast("list[int]", ids)


def _generation(
    network: Any, tokenizer: Any, max_new_tokens: int, temperature: float, top_p: float
) -> GenerationConfig:
    """Plain sampling. The model's own settings are replaced: generate() fills what is unset from them."""
    ends = network.generation_config.eos_token_id if network.can_generate() else None
    ends = tokenizer.eos_token_id if ends is None else ends
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    settings = GenerationConfig(
        do_sample=temperature > 0,
        max_new_tokens=max_new_tokens,
        eos_token_id=end_ids or None,
        pad_token_id=end_ids[0] if end_ids else 0,
        **drawn,
    )
    network.generation_config = settings
    return settings


def _answer(network: Any, ids: list[int], settings: GenerationConfig, seed: int) -> list[int]:
    prompt = torch.tensor([ids], device=network.device)
    devices = [prompt.device] if prompt.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        drawn = network.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return cast("list[int]", drawn[0, len(ids) :].tolist())


def _segment(document: str, kind: str, prompt: list[int], answer: list[int], prefill_rows: int) -> Segment:
    token_ids: NDArray[np.int32] = np.array(prompt + answer, dtype=np.int32)
    token_ids.setflags(write=False)
    length = len(prompt)
    return Segment(
        id=document,
        document=document,
        kind=kind,
        depth=1 << (length - 1).bit_length(),
        token_ids=token_ids,
        decode_from=length,
        windows=((max(0, length - prefill_rows), length),),
    )


def _source(segment: Segment, prompt: Prompt, path: Path) -> Source:
    text = json.dumps(prompt.messages, sort_keys=True)
    return Source(
        document=segment.document, origin=f"{path.name}:{prompt.line}", licence="the user's", sha256=_sha256(text)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
