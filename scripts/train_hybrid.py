"""Train the small hybrid that tests and results use: Qwen3-Next's shape, from texts every CPython has.

    python scripts/train_hybrid.py FOLDER                          # from scratch: tokenizer, training, checkpoint
    python scripts/train_hybrid.py FOLDER --start tests/data/hybrid --tokens 4000000    # go on from other weights
    python scripts/train_hybrid.py FOLDER --minutes 30             # stop after half an hour; the same command goes on

Texts are CPython's standard library and `pydoc_data.topics`; one document in 40 is held out. For one CPython, one torch
and one number of threads the result is the same to the bit, however often the run was stopped: the schedule counts
tokens, not seconds, and a batch depends on its step alone. FOLDER/state.pt holds what a resumed run needs and is
removed at the end. Then FOLDER is a bf16 checkpoint with `training.json`: the held-out loss beside what a unigram and
a bigram model reach on the same tokens, nats a token.

About 1,600 tokens a second on two cores: the default of 10 million tokens takes an hour and three quarters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 2048
BOS, EOS = 1, 2
HELD_OUT = 40  # one document in so many
TABLES = ("site-packages", "/test/", "/lib2to3/", "/encodings/", "/pydoc_data/", "stringprep")  # not text
SHORTEST = 400  # characters of a document
WARM_UP = 100  # steps
SAVE_EVERY = 200  # steps
PEAK, LAST = 1.5e-3, 0.03  # learning rate, and what is left of it at the end


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model. vLLM's CPU kernels want GDN heads of 64 or 128, and its class one MoE layer at least."""

    layers: int = 8
    hidden: int = 256
    inner: int = 640
    heads: int = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the schedule: sequences of one length."""

    share: float  # of all tokens
    length: int
    rows: int


FULL = (Shape(), (Stage(share=0.25, length=256, rows=16), Stage(share=0.35, length=512, rows=8),
                  Stage(share=0.2, length=1024, rows=4), Stage(share=0.2, length=4096, rows=1)))  # fmt: skip
TINY = (Shape(layers=4, hidden=64, inner=64, heads=1), (Stage(share=0.5, length=32, rows=2),
                                                        Stage(share=0.5, length=64, rows=1)))  # fmt: skip


# --------------------------------------------------------------------------- texts


def documents(limit: int | None) -> list[str]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted([*library.glob("*.py"), *library.glob("[a-hj-z]*/*.py")])
    texts = [f.read_text(errors="ignore") for f in files if not any(table in f.as_posix() for table in TABLES)]
    texts = [text for text in texts if len(text) > SHORTEST] + [topics[name] for name in sorted(topics)]
    return texts[:limit]


def tokenizer_of(folder: Path, texts: Sequence[str]) -> Any:
    """The folder's tokenizer, a byte-level BPE, trained first where there is none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator(texts, trainer)
        names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def split(tokenizer: Any, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out ids, documents one after the other."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()
    held = set(order[::HELD_OUT])
    ids = [[BOS, *encoding.ids, EOS] for encoding in tokenizer.encode_batch(list(texts))]
    train = [i for d in order if d not in held for i in ids[d]]
    return torch.tensor(train), torch.tensor([i for d in order if d in held for i in ids[d]])


# --------------------------------------------------------------------------- model and training


def new_model(shape: Shape) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    gdn = {"linear_num_key_heads": shape.heads, "linear_num_value_heads": shape.heads}
    gdn |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    # the least of the mixture of experts that vLLM's class can do with: two experts in the last layer
    experts = {"mlp_only_layers": list(range(shape.layers - 1)), "num_experts": 2, "num_experts_per_tok": 1}
    experts |= {"moe_intermediate_size": shape.hidden, "shared_expert_intermediate_size": shape.hidden}
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(2, shape.heads),
        num_key_value_heads=max(1, shape.heads // 2),
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
        **gdn,
        **experts,
    )
    return remembering(Qwen3NextForCausalLM(config))


def remembering(model: Any) -> Any:
    """Let heads start with half-lives from half a token to some 700, log-uniform steps as in Mamba.

    The architecture's own start forgets within a token or two, and a short training leaves it there: then what is lost
    with a recurrent state, or rounded in it, is gone by the next token and no test can see it.
    """
    generator = torch.Generator().manual_seed(2)
    for layer in gdn_layers(model):
        heads = len(layer.A_log)
        rate = torch.empty(heads).uniform_(1, 16, generator=generator)
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        layer.A_log.data.copy_(rate.log())
        layer.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))  # softplus, inverted
    return model


def gdn_layers(model: Any) -> list[Any]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


def half_lives(model: Any) -> list[list[float]]:
    """Tokens after which a head's state has faded by half, layer by layer, where the gate's input is zero."""
    rates = [layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias) for layer in gdn_layers(model)]
    return [[round(x, 3) for x in (math.log(2) / rate).tolist()] for rate in rates]


def tie(model: Any) -> Any:
    """Training shares the embedding with the head; the checkpoints are untied."""
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.get_input_embeddings().weight
    return model


def optimiser_of(model: Any) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def steps_of(stages: Sequence[Stage], tokens: int) -> list[Stage]:
    return [s for s in stages for _ in range(max(1, int(tokens * s.share) // (s.length * s.rows)))]


def rate(step: int, steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return PEAK * min(1.0, (step + 1) / WARM_UP) * (LAST + (1 - LAST) * cosine)


def batch(ids: torch.Tensor, stage: Stage, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, len(ids) - stage.length, (stage.rows,), generator=generator).tolist()
    return torch.stack([ids[start : start + stage.length] for start in starts])


def train(model: Any, ids: torch.Tensor, schedule: Sequence[Stage], folder: Path, minutes: float) -> bool:
    """Go on from FOLDER/state.pt or begin; False if the minutes ended before the schedule did."""
    optimiser, begun, state = optimiser_of(model), time.monotonic(), folder / "state.pt"
    step, seconds = 0, 0.0
    if state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step, seconds = saved["step"], saved["seconds"]
    model.train()
    while step < len(schedule):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, len(schedule))
        x = batch(ids, schedule[step], step)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        spent = time.monotonic() - begun
        stopping = spent > 60 * minutes and step < len(schedule)
        if stopping or step % SAVE_EVERY == 0 or step == len(schedule):
            print(f"step {step} of {len(schedule)}, loss {loss.item():.3f}, {seconds + spent:.0f} s", flush=True)
            save(state, model=model.state_dict(), optimiser=optimiser.state_dict(), step=step, seconds=seconds + spent)
        if stopping:
            return False
    return True


def save(path: Path, **content: Any) -> None:
    torch.save(content, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


# --------------------------------------------------------------------------- what it reached


def held_out_loss(model: Any, held: torch.Tensor, length: int, rows: int = 24) -> float:
    model.eval()
    starts = torch.linspace(0, len(held) - length, min(rows, len(held) // length)).long().tolist()
    windows = [held[None, start : start + length] for start in starts]
    with torch.no_grad():
        return sum(float(model(input_ids=x, labels=x).loss) for x in windows) / len(windows)


def count_losses(train_ids: torch.Tensor, held: torch.Tensor, vocabulary: int) -> tuple[float, float]:
    """Held-out nats a token of a unigram (one added to every count) and a bigram model (20 unigrams added to a row)."""
    counts = torch.bincount(train_ids, minlength=vocabulary).double() + 1
    unigram = counts / counts.sum()
    pairs = torch.bincount(train_ids[:-1] * vocabulary + train_ids[1:], minlength=vocabulary**2)
    bigram = pairs.view(vocabulary, vocabulary).double() + 20 * unigram
    bigram /= bigram.sum(1, keepdim=True)
    return -float(unigram[held].log().mean()), -float(bigram[held[:-1], held[1:]].log().mean())


def export(model: Any, folder: Path) -> None:
    """Untied: vLLM's Qwen3-Next class does not tie its head, and without weights of its own it would stay unset."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.config.architectures = ["Qwen3NextForCausalLM"]
    model.config.dtype = "bfloat16"
    model.to(torch.bfloat16).save_pretrained(folder)


def report(model: Any, ids: torch.Tensor, held: torch.Tensor, schedule: Sequence[Stage], seconds: float) -> Any:
    unigram, bigram = count_losses(ids, held, VOCABULARY)
    lengths = [n for n in (1024, 4096) if n <= max(stage.length for stage in schedule)] or [schedule[-1].length]
    return {
        "steps": len(schedule),
        "tokens": sum(stage.length * stage.rows for stage in schedule),
        "seconds": round(seconds),
        "held_out_tokens": len(held),
        "held_out_loss": {str(n): held_out_loss(model, held, n) for n in lengths},
        "half_lives": half_lives(model),
        "unigram": unigram,
        "bigram": bigram,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    shape, stages = TINY if options.tiny else FULL
    texts = documents(60 if options.tiny else None)
    if options.start:
        (options.folder / "tokenizer.json").write_bytes((options.start / "tokenizer.json").read_bytes())
    ids, held = split(tokenizer_of(options.folder, texts), texts)
    model = tie(starting_model(options.start) if options.start else new_model(shape))
    schedule = steps_of(stages, options.tokens)
    if not train(model, ids, schedule, options.folder, options.minutes):
        print("stopped: run the same command again to go on", flush=True)
        return
    state = options.folder / "state.pt"
    facts = report(model, ids, held, schedule, torch.load(state)["seconds"])
    export(model, options.folder)
    (options.folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    state.unlink()
    print(json.dumps(facts), flush=True)


def starting_model(folder: Path) -> Any:
    from transformers import Qwen3NextForCausalLM

    return Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes; an interrupted run goes on there")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens to train on")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long, to go on later")
    parser.add_argument("--start", type=Path, help="weights and tokenizer to begin with")
    parser.add_argument("--threads", type=int, default=2, help="of torch; another number gives other bits")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a few texts: a rehearsal in seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
