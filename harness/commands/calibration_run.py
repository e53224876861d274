"""Calibration and sweeps at work: recordings made, compared, judged, kept as small results, and their rows removed.

Everything lies in a work folder, WORK/CORPUS/:

    corpus.parquet, reference/, floor-DTYPE/    made if they are not there; recordings made elsewhere may be linked here
    rows/NAME/                                  of the job under way only
    positions/DTYPE/NAME.parquet                every column per position, for a closer look

What counts are the results, in another folder that is committed. A run that was killed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.calibration import calibrate as cal
from harness.calibration.calibrate import Result
from harness.calibration.jobs import STOCK, Job, Setting, job_of, same_as_stock, stock_name, with_stock
from harness.commands.result_keeper import TWIN, Keeper, machine
from harness.errors import MismatchError, UsageError
from harness.patching import LoadedPatch
from harness.sites import RECURRENT
from harness.types import Corpus, Gates, LogitsDtype

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One corpus, its reference, and where everything goes."""

    model: str  # a folder or hub id
    corpus: Corpus
    folder: Path  # WORK/CORPUS
    results: Path
    base: Setting  # of the stock build
    common: tuple[LoadedPatch, ...] = ()  # applied to every build
    say: Say = field(default=print)

    @property
    def dtype(self) -> str:
        """The dtype of the production build."""
        return str(self.base.engine.get("dtype", "bfloat16"))

    @property
    def reference(self) -> Path:
        """The f32 reference's folder."""
        return self.folder / "reference"

    def floor(self, dtype: str) -> Path | None:
        """The floor in a dtype; None if there is none: HuggingFace in float32 is the reference itself."""
        folder = self.folder / f"floor-{dtype}"
        return folder if folder.is_dir() and dtype != TWIN else None

    def positions(self, name: str, dtype: str) -> Path:
        """Where a job's columns per position go."""
        return self.folder / "positions" / dtype / f"{name}.parquet"

    @property
    def twin(self) -> Bench:
        """The same in float32."""
        return replace(self, base=replace(self.base, engine={**self.base.engine, "dtype": TWIN}))


# --------------------------------------------------------------------------- what must be there first


def find_corpus(name: str, model: str, work: Path, say: Say) -> Corpus:
    """A corpus file, or a packaged corpus by name: the one in the work folder, or one built there.

    Raises UsageError or StorageError as building and loading do.
    """
    from harness.corpus import build_corpus, load_corpus, load_manifest, load_tokenizer, save_corpus

    if Path(name).is_file():
        return load_corpus(Path(name))
    folder = work / name
    for there in (folder / "corpus.parquet", folder / "reference" / "corpus.parquet"):
        if there.is_file():
            return load_corpus(there)
    say(f"building corpus {name}")
    corpus = build_corpus(load_manifest(name), load_tokenizer(model), tokenizer_name=Path(model).name)
    folder.mkdir(parents=True, exist_ok=True)
    save_corpus(corpus, folder / "corpus.parquet")
    return corpus


def require_references(bench: Bench, dtypes: Sequence[str]) -> None:
    """Make the reference, and a floor in each dtype, where the work folder lacks them or has them half."""
    for name, dtype in [("reference", "float32"), *((f"floor-{d}", d) for d in dtypes)]:
        folder = bench.folder / name
        if not _is_whole(folder, bench.corpus):
            bench.say(f"recording {folder}: HuggingFace in {dtype}")
            _record_reference(bench, folder, dtype)  # type: ignore[arg-type]  # a dtype's name


def _is_whole(folder: Path, corpus: Corpus) -> bool:
    from harness.storage import Recording

    if not (folder / "recording.json").is_file():
        return False
    manifest = Recording(folder, verify=False).manifest
    if manifest.corpus_sha256 != corpus.sha256:
        raise MismatchError(
            f"{folder} is of corpus {manifest.corpus_name} {manifest.corpus_sha256[:12]}, not of {corpus.name} "
            f"{corpus.sha256[:12]}: move it away, or name another work folder"
        )
    return manifest.complete


def _record_reference(bench: Bench, folder: Path, dtype: LogitsDtype) -> None:
    from harness.reference import record_reference
    from harness.report.console import progress_bar

    with progress_bar(f"{folder.name}, rows") as progress:
        record_reference(bench.model, bench.corpus, folder, dtype=dtype, resume=folder.is_dir(), progress=progress)


# --------------------------------------------------------------------------- jobs


def applicable(patches: Sequence[LoadedPatch], model: str) -> list[LoadedPatch]:
    """Those that a model has the parts for: patches of a recurrent state are for hybrid models alone."""
    from harness.reference_model import read_config

    hybrid = hasattr(read_config(model), "linear_num_value_heads")
    return [p for p in patches if hybrid or not p.patch.site.startswith(RECURRENT)]


def patch_jobs(bench: Bench, patches: Sequence[LoadedPatch]) -> list[Job]:
    """One job for each patch, those that the stock build has already in force left out."""
    applied = {patch.patch.name for patch in bench.common}
    return [job_of(patch, bench.base, bench.corpus) for patch in patches if patch.patch.name not in applied]


def run(bench: Bench, patches: Sequence[LoadedPatch], gates: Gates) -> tuple[int, int]:
    """Record, judge and keep what has no result yet. Returns (made now, failed now).

    A variation that is the stock build itself in this setting gets the stock build's result.
    """
    jobs = patch_jobs(bench, patches)
    real = [job for job in jobs if not same_as_stock(job, bench.base)]
    idle = [job for job in jobs if same_as_stock(job, bench.base)]
    idle += [
        Job(name=p.patch.name, setting=bench.base, patch=p, stock=stock_name(bench.base, bench.base))
        for p in bench.common
        if p.patch.name in {patch.patch.name for patch in patches}
    ]
    results = cal.load_results(bench.results)
    here = machine()
    left = cal.unfinished(real, results, corpus=bench.corpus.name)
    present = [r.name for r in results if r.kind == "stock" and _stands(r, bench, here)]
    todo = with_stock(left, bench.base, present=present)
    if idle and STOCK not in {*present, *(job.name for job in todo)}:
        todo = [Job(name=STOCK, setting=bench.base), *todo]
    keeper = Keeper(bench, gates, total=len(todo))
    if todo:
        bench.say(f"{bench.corpus.name}: {len(todo)} to record, {len(real) - len(left)} there already")
        record_all(bench, todo, keeper)
    _save_idle(bench, idle)
    return keeper.made, keeper.failures


def _stands(stock: Result, bench: Bench, here: str) -> bool:
    """Whether an unchanged build recorded before is what new recordings may be held against, bit by bit."""
    return (
        (stock.corpus, stock.dtype, stock.machine, stock.error) == (bench.corpus.name, bench.dtype, here, "")
        and stock.name == stock_name(stock.setting, bench.base)
        and bench.positions(stock.name, bench.dtype).is_file()
    )


def record_all(bench: Bench, todo: Sequence[Job], keeper: Keeper) -> None:
    """Run the campaign; results are kept as they come."""
    from harness.engine.campaign import Campaign
    from harness.report.console import progress_bar

    campaign = Campaign(
        model=bench.model, corpus=bench.corpus, folder=bench.folder / "rows" / bench.dtype, common=bench.common
    )
    with progress_bar(f"{bench.corpus.name}, requests") as advance:
        campaign.run(todo, recorded=keeper.recorded, failed=keeper.failed, advance=advance)


def _save_idle(bench: Bench, idle: Sequence[Job]) -> None:
    stock = next(
        (r for r in cal.load_results(bench.results) if _is_stock_here(r, bench)),
        None,
    )
    for job in idle:
        if stock is not None:
            cal.save_result(cal.same_build(job, stock), bench.results)
            bench.say(f"{job.name}: is the stock build itself in this setting")


def _is_stock_here(result: Result, bench: Bench) -> bool:
    return cal.is_base_stock(result) and result.corpus == bench.corpus.name and result.dtype == bench.dtype


# --------------------------------------------------------------------------- the stages


def run_benign(bench: Bench, patches: Sequence[LoadedPatch], gates: Gates) -> tuple[int, int]:
    """Record the benign variations among `patches`; those in another dtype last, after a floor in it was made."""
    by_dtype: dict[str, list[LoadedPatch]] = {bench.dtype: []}
    for patch in patches:
        if patch.patch.kind == "benign":
            by_dtype.setdefault(str(patch.patch.engine.get("dtype", bench.dtype)), []).append(patch)
    made = failed = 0
    for dtype, chosen in by_dtype.items():
        if chosen:
            require_references(bench, [dtype])
            more, broken = run(bench, chosen, gates)
            made, failed = made + more, failed + broken
    return made, failed


def run_faults(bench: Bench, patches: Sequence[LoadedPatch], gates: Gates) -> tuple[int, int]:
    """Record faults as test data: all of them on a smoke corpus, elsewhere what those results leave undecided.

    Those that bf16 noise is known to hide run in float32 too, on a smoke corpus. Raises UsageError if the limits are
    not final, or a smoke result is lacking.
    """
    chosen = [p for p in patches if p.patch.kind == "fault"]
    require_references(bench, [bench.dtype])
    _require_limits(bench, gates)
    if bench.corpus.smoke:
        made, failed = run(bench, chosen, gates)
        again, failed_again = run(bench.twin, [p for p in chosen if p.patch.twin], gates)
        return made + again, failed + failed_again
    smoke = [
        r for r in cal.load_results(bench.results) if r.smoke and r.kind == "fault" and (r.recording or not r.error)
    ]
    lacking = sorted({p.patch.name for p in chosen} - {r.name for r in smoke})
    if lacking:
        raise UsageError(
            f"{len(lacking)} faults have no result on a smoke corpus yet ({', '.join(lacking[:3])}, ...): run "
            "`logitgate calibrate faults --corpus quick` first; only what it leaves undecided needs a larger corpus"
        )
    names = set(cal.undecided(smoke, [p.patch.name for p in chosen]))
    return run(bench, [p for p in chosen if p.patch.name in names], gates)


def _require_limits(bench: Bench, gates: Gates) -> None:
    from harness.calibration.limits import require_final
    from harness.storage import Recording

    build = Recording(bench.reference, verify=False).manifest.build
    require_final(gates, replace(build, dtype=bench.dtype))
