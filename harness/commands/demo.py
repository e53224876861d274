"""The whole path on the embedded model: a healthy build that must pass, then a planted fault that must fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import StorageError
from harness.types import Comparison, Corpus, LogitsDtype, Status, Verdict

CORPUS = "quick"
FAULT = "rope_bf16_positions"
ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    # Room for one request of the model's full context. By default vLLM takes nearly all memory, and does not start on a
    # machine that does anything else.
    "kv_cache_memory_bytes": 512 << 20,
}
CONCURRENCY = 8  # all segments at once; each request still decodes one id a step
WITHOUT_BF16_UNITS = "gemm_f32"  # benign: the same products, several times faster on such a processor

Say = Callable[[str], None]
Show = Callable[[Comparison, Verdict], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo came to."""

    healthy: Verdict
    faulty: Verdict

    @property
    def as_promised(self) -> bool:
        """The healthy build passed and the faulty one failed."""
        return self.healthy.status is Status.PASS and self.faulty.status is Status.FAIL


def run_demo(folder: Path, *, say: Say, show: Show) -> Outcome:
    """Record a reference, a floor and two builds below `folder`, and judge both builds.

    `say` gets one line for each step, `show` each verdict. A reference or floor that an earlier run left there is
    used again if it is whole and was made from the same texts, weights and versions; engines are always recorded anew.
    Raises StorageError if something that is not the demo's own stands where a recording belongs.
    """
    from harness.embedded import embedded_model

    say("1/5  the embedded model, SmolLM2-135M-Instruct, and a small corpus of code and prose")
    model = str(embedded_model(progress=lambda sentence: say(f"     {sentence}")))
    corpus = _make_corpus(model, folder / f"{CORPUS}.parquet")
    kinds = ", ".join(sorted({segment.kind for segment in corpus.segments}))
    say(f"     {len(corpus.segments)} segments of {kinds}; {corpus.rows} scored positions, prefill and decode")

    say("2/5  reference: HuggingFace in f32, what the model should compute")
    _record_huggingface(model, corpus, folder / "reference", "float32", say)
    say("3/5  floor: HuggingFace in bf16, the normal difference between correct builds")
    _record_huggingface(model, corpus, folder / "floor", "bfloat16", say)

    say(f"4/5  the stock vLLM engine in bf16, then the same engine with a planted fault: {FAULT}")
    _record_engines(model, corpus, folder, say)

    say("5/5  verdicts")
    healthy = _judge(folder, "stock", say, show)
    faulty = _judge(folder, "fault", say, show)
    return Outcome(healthy=healthy, faulty=faulty)


def next_steps(folder: Path) -> str:
    """What to run after the demo."""
    return "\n".join(
        [
            "Next:",
            f"  logitgate compare {folder}/reference {folder}/fault --floor {folder}/floor --baseline {folder}/stock",
            f"  logitgate show {folder}/stock",
            f"  logitgate patches show {FAULT}",
            "  logitgate patches list",
            "Your own build: `corpus build embedded --model M`, `reference`, `record`, `compare`; see the README.",
        ]
    )


def _make_corpus(model: str, path: Path) -> Corpus:
    from harness.corpus import build_corpus, load_manifest, load_tokenizer, save_corpus

    corpus = build_corpus(load_manifest(CORPUS), load_tokenizer(model), tokenizer_name="smollm2")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_corpus(corpus, path)
    return corpus


def _record_huggingface(model: str, corpus: Corpus, folder: Path, dtype: LogitsDtype, say: Say) -> None:
    from harness.report.console import progress_bar

    if _still_valid(folder, model, corpus, dtype):
        say(f"     {folder} is there already, whole, and made from the same texts, weights and versions")
        return

    from harness.reference import record_reference

    _clear(folder)
    with progress_bar(f"HuggingFace {dtype}, rows") as progress:
        record_reference(model, corpus, folder, dtype=dtype, progress=progress)


def _record_engines(model: str, corpus: Corpus, folder: Path, say: Say) -> None:
    """One engine load serves both builds: the patch is applied in its running workers."""
    from harness._environment import has_bf16_units
    from harness.engine.session import EngineSession
    from harness.patching import load_patch
    from harness.report.console import progress_bar

    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # vLLM leaves one of two cores idle otherwise
    common = () if has_bf16_units() else (load_patch(WITHOUT_BF16_UNITS),)
    if common:
        say(f"     this processor has no bf16 units: both builds run with the benign patch {WITHOUT_BF16_UNITS}")
    fault = load_patch(FAULT)
    with EngineSession(model, {**ENGINE, **fault.patch.engine}) as session:
        for name, patches in (("stock", common), ("fault", (*common, fault))):
            _clear(folder / name)
            with session.patched(patches) as described, progress_bar(f"vLLM {name}, requests") as progress:
                session.record(corpus, folder / name, patches=described, concurrency=CONCURRENCY, progress=progress)


def _judge(folder: Path, candidate: str, say: Say, show: Show) -> Verdict:
    from harness.compare import compare
    from harness.judge import judge, load_gates

    say(f"\n     {folder / candidate} against {folder / 'reference'}")
    comparison = compare(folder / "reference", folder / candidate, floor=folder / "floor")
    verdict = judge(comparison, load_gates(None))
    show(comparison, verdict)
    return verdict


def _still_valid(folder: Path, model: str, corpus: Corpus, dtype: LogitsDtype) -> bool:
    """Whether a recording is whole and would come out the same if it were made again."""
    from harness._environment import package_versions
    from harness.embedded import weights_sha256
    from harness.storage import Recording

    try:
        manifest = Recording(folder).manifest
    except StorageError:
        return False
    build = manifest.build
    return (
        manifest.complete
        and manifest.corpus_sha256 == corpus.sha256
        and build.dtype == dtype
        and build.weights_sha256 == weights_sha256(model)
        and dict(build.packages) == package_versions(build.packages)
    )


def _clear(folder: Path) -> None:
    """Remove an earlier recording. Anything else that stands there is left for `begin_recording` to refuse."""
    if (folder / "recording.json").is_file():
        shutil.rmtree(folder)
