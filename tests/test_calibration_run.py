"""Campaigns and calibration at work, on an engine that is pretended: kills, deaths, resumption, order of the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

from harness.calibration.calibrate import load_results
from harness.calibration.jobs import Setting
from harness.commands.calibrate import gates as generate_gates
from harness.commands.calibrate import report as write_report
from harness.commands.calibration_run import Bench, find_corpus, run, run_benign, run_faults
from harness.commands.sweep_run import Sweep, attention_p_jobs, backend_jobs
from harness.corpus import save_corpus
from harness.errors import EngineError, PatchError, UsageError
from harness.gates import load_gates
from harness.patching import LoadedPatch
from harness.patterns import Pattern
from harness.storage import load_positions
from harness.types import Corpus, Json, Manifest, Status
from tests import synthetic
from tests.calibrating import patch

pytest.importorskip("torch")

CORPUS = synthetic.make_corpus(name="signoff", documents=3, smoke=False)
SMOKE = synthetic.make_corpus(name="smoke", documents=2, smoke=True)
NOISE = 0.02  # of the floor and of a correct build: a KL of about 2e-4


@dataclass
class Engine:
    """Pretends to be every engine session of a test; patches decide its noise by their name."""

    corpus: Corpus
    loads: list[Json] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda name: None
    alive: bool = True
    resumed_requests: int = 0
    max_positions: int = 10_000
    _force: str = "stock"
    _arguments: Json = field(default_factory=dict)

    def __call__(self, model: str, arguments: Json, *, untested: bool = False) -> Self:
        if "broken" in arguments:
            raise EngineError("vLLM refuses it")
        self.loads.append(dict(arguments))
        self._arguments, self.alive = arguments, True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._force = "stock"

    def answers(self) -> bool:
        return self.alive

    def forget_prefixes(self) -> None:
        self.recorded.append("(prefixes forgotten)")

    def greedy(self, prompts: dict[str, Any], tokens: int) -> dict[str, list[tuple[int, float]]]:
        return {name: [(len(self._force), 0.5)] * 3 for name in prompts}

    @contextmanager
    def patched(self, patches: Sequence[LoadedPatch]) -> Iterator[tuple[Json, ...]]:
        self._force = patches[-1].patch.name if patches else "stock"
        yield tuple(p.describe() for p in patches)
        if self._force == "idle":
            raise PatchError("patch idle never fired")

    def record(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        patches: Sequence[Json],
        pattern: Pattern,
        prompt_rows: str,
        resume: bool = False,
        progress: Any = None,
    ) -> Manifest:
        self.before(self._force)
        self.recorded.append(self._force)
        dtype = self._arguments["dtype"]
        changed = dtype != "bfloat16" or "block_size" in self._arguments
        seed = 9 if self._force in ("stock", "unchanged") and not changed else sum(map(ord, self._force)) + changed
        noise = {"loud": 50 * NOISE, "slight": 1.2 * NOISE}.get(self._force, NOISE)
        if dtype == "float32":
            noise = {"loud": NOISE, "hidden": NOISE / 10}.get(self._force, 1e-7)
        rows = synthetic.with_noise(synthetic.make_rows(corpus), noise, seed=seed)
        build = synthetic.make_build(dtype=dtype, patches=tuple(patches))
        return synthetic.record(folder, corpus, rows, dtype="float32", build=build)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(CORPUS)
    monkeypatch.setattr("harness.engine.campaign.EngineSession", made)
    return made


def bench(work: Path, corpus: Corpus = CORPUS, said: list[str] | None = None) -> Bench:
    made = Bench(
        model="synthetic",
        corpus=corpus,
        folder=work / corpus.name,
        results=work / "results",
        base=Setting(engine={"dtype": "bfloat16"}, pattern=Pattern(concurrency=2)),
        say=(said if said is not None else []).append,
    )
    rows = synthetic.make_rows(corpus)
    if not made.reference.exists():
        synthetic.record(made.reference, corpus, rows)
        build = synthetic.make_build(dtype="bfloat16", engine="huggingface")
        noisy = synthetic.with_noise(rows, NOISE, seed=77)
        synthetic.record(made.folder / "floor-bfloat16", corpus, noisy, build=build)
    return made


BENIGN = [patch(f"v{i}", "benign") for i in range(4)]


def names(folder: Path) -> dict[str, str]:
    return {r.name: r.word for r in load_results(folder)}


def test_one_load_serves_all_and_only_results_and_columns_stay(engine: Engine, tmp_path: Path) -> None:
    made, failed = run_benign(bench(tmp_path), BENIGN, load_gates(None))
    assert (made, failed) == (5, 0)
    assert len(engine.loads) == 1
    assert engine.recorded == ["stock", "v0", "v1", "v2", "v3"]
    results = {r.name: r for r in load_results(tmp_path / "results")}
    assert set(results) == {"stock", "v0", "v1", "v2", "v3"}
    assert results["stock"].changed is None
    assert all(results[f"v{i}"].changed for i in range(4))
    assert list((tmp_path / "signoff" / "rows").rglob("part-*")) == []
    columns = load_positions(tmp_path / "signoff" / "positions" / "bfloat16" / "v0.parquet")
    assert len(columns["kl20"]) == CORPUS.rows
    assert results["v0"].mean_kl == pytest.approx(columns["kl20"].mean(), rel=1e-5)
    others = results["v0"].others
    assert others is not None
    assert 0.9 < others["cosine"] < 1
    assert others["kl_mean"] == pytest.approx(columns["kl_full"].mean(), rel=1e-5)


def test_a_killed_run_goes_on_where_it_stopped(engine: Engine, tmp_path: Path) -> None:
    def kill(name: str) -> None:
        if name == "v2":
            raise KeyboardInterrupt

    engine.before = kill
    with pytest.raises(KeyboardInterrupt):
        run_benign(bench(tmp_path), BENIGN, load_gates(None))
    assert set(names(tmp_path / "results")) == {"stock", "v0", "v1"}
    engine.before, engine.recorded = (lambda name: None), []
    made, failed = run_benign(bench(tmp_path), BENIGN, load_gates(None))
    assert engine.recorded == ["v2", "v3"]
    assert (made, failed) == (2, 0)
    engine.recorded = []
    assert run_benign(bench(tmp_path), BENIGN, load_gates(None)) == (0, 0)
    assert engine.recorded == []


def test_on_another_machine_the_stock_build_is_recorded_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_benign(bench(tmp_path), BENIGN[:2], load_gates(None))
    engine.recorded = []
    monkeypatch.setattr("harness.commands.calibration_run.machine", lambda: "another")
    run_benign(bench(tmp_path), BENIGN[:3], load_gates(None))
    assert engine.recorded == ["stock", "v2"]


def test_a_stock_build_in_another_setting_is_not_the_one_to_compare_with(engine: Engine, tmp_path: Path) -> None:
    run_benign(bench(tmp_path), BENIGN[:1], load_gates(None))
    engine.recorded = []
    window = replace(bench(tmp_path), base=replace(bench(tmp_path).base, prompt_rows="window"))
    run_benign(window, BENIGN[:1], load_gates(None))
    assert engine.recorded == ["stock", "v0"]


def test_a_dead_engine_is_started_again_for_the_jobs_that_are_left(engine: Engine, tmp_path: Path) -> None:
    def die(name: str) -> None:
        if name == "v1":
            engine.alive = False
            raise EngineError("the engine stopped: out of memory")

    engine.before = die
    made, failed = run_benign(bench(tmp_path), BENIGN, load_gates(None))
    assert (made, failed) == (4, 1)
    assert len(engine.loads) == 2
    broken = next(r for r in load_results(tmp_path / "results") if r.name == "v1")
    assert "out of memory" in broken.error
    engine.before, engine.recorded = (lambda name: None), []
    run_benign(bench(tmp_path), BENIGN, load_gates(None))
    assert engine.recorded == ["v1"]  # what made no rows is tried again
    assert names(tmp_path / "results")["v1"] != "ERROR"


def test_a_patch_that_never_fires_or_changes_nothing_is_an_error_and_the_others_go_on(
    engine: Engine, tmp_path: Path
) -> None:
    chosen = [patch("idle", "benign"), patch("unchanged", "benign"), *BENIGN[:1]]
    made, failed = run(bench(tmp_path), chosen, load_gates(None))
    assert (made, failed) == (2, 2)
    errors = {r.name: r.error for r in load_results(tmp_path / "results")}
    assert "never fired" in errors["idle"]
    assert "no bit differs" in errors["unchanged"]
    assert errors["v0"] == errors["stock"] == ""
    assert len(engine.loads) == 1


def test_a_variation_in_another_dtype_comes_last_and_is_held_against_a_floor_of_its_own(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(model: str, corpus: Corpus, folder: Path, *, dtype: str, **_: Any) -> None:
        rows = synthetic.with_noise(synthetic.make_rows(corpus), NOISE / 8, seed=5)
        synthetic.record(folder, corpus, rows, build=synthetic.make_build(dtype=dtype))

    monkeypatch.setattr("harness.reference.record_reference", make)
    half = patch("half", "benign", hooked=False, engine={"dtype": "float16"})
    run_benign(bench(tmp_path), [half, *BENIGN[:1]], load_gates(None))
    assert [load["dtype"] for load in engine.loads] == ["bfloat16", "float16"]
    assert (tmp_path / "signoff" / "floor-float16" / "recording.json").is_file()
    made = next(r for r in load_results(tmp_path / "results") if r.name == "half")
    assert made.dtype == "float16"
    assert made.changed
    assert made.floor_kl == pytest.approx(made.mean_kl / 64, rel=0.3)


def test_a_setting_that_does_not_start_fails_alone(engine: Engine, tmp_path: Path) -> None:
    chosen = [patch("odd", "benign", hooked=False, engine={"broken": 1}), *BENIGN[:1]]
    made, failed = run(bench(tmp_path), chosen, load_gates(None))
    assert (made, failed) == (2, 1)
    errors = {r.name: r.error for r in load_results(tmp_path / "results")}
    assert "did not start" in errors["odd"]


def test_a_variation_that_is_the_stock_build_is_not_recorded(engine: Engine, tmp_path: Path) -> None:
    said: list[str] = []
    chosen = [patch("two", "benign", hooked=False, requests={"concurrency": 2})]
    run(bench(tmp_path, said=said), chosen, load_gates(None))
    assert engine.recorded == ["stock"]
    results = {r.name: r for r in load_results(tmp_path / "results")}
    assert results["two"].checks == results["stock"].checks
    assert any("is the stock build itself" in line for line in said)


def test_a_patch_that_every_build_has_gets_the_stock_build_s_result(engine: Engine, tmp_path: Path) -> None:
    made = replace(bench(tmp_path), common=(patch("everywhere", "benign"),))
    run(made, [patch("everywhere", "benign"), *BENIGN[:1]], load_gates(None))
    assert engine.recorded == ["everywhere", "v0"]  # the stock build carries it, and is named by it here
    results = {r.name: r for r in load_results(tmp_path / "results")}
    assert results["everywhere"].checks == results["stock"].checks
    assert results["everywhere"].changed is False


def test_a_pattern_that_did_not_happen_is_an_error(engine: Engine, tmp_path: Path) -> None:
    chosen = [patch("hit", "benign", hooked=False, requests={"prefix_hit": True})]
    _, failed = run(bench(tmp_path), chosen, load_gates(None))
    assert failed == 1
    errors = {r.name: r.error for r in load_results(tmp_path / "results")}
    assert "did not happen" in errors["hit"]
    assert "(prefixes forgotten)" in engine.recorded


def test_faults_wait_for_limits_and_larger_corpora_for_what_is_undecided(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [patch("loud"), patch("slight"), patch("hidden", twin=True)]
    small, large = bench(tmp_path, SMOKE), bench(tmp_path)
    with pytest.raises(UsageError, match="limits come first"):
        run_faults(small, faults, load_gates(None))
    benign = [*BENIGN, *(patch(f"w{i}", "benign") for i in range(8))]
    run_benign(large, benign, load_gates(None))
    monkeypatch.setattr("harness.patching.list_patches", lambda: benign)
    generate_gates(tmp_path / "gates.toml", tmp_path / "results")
    limits = load_gates(tmp_path / "gates.toml")
    assert limits.gates[-2].limit < 2
    with pytest.raises(UsageError, match="--corpus quick"):
        run_faults(large, faults, limits)
    engine.recorded = []
    run_faults(small, faults, limits)
    assert engine.recorded == ["stock", "loud", "slight", "hidden", "stock", "hidden"]
    words = {(r.name, r.dtype): r for r in load_results(tmp_path / "results") if r.smoke}
    assert words["loud", "bfloat16"].status is Status.FAIL
    assert words["hidden", "float32"].status is Status.FAIL
    assert words["hidden", "bfloat16"].status is not Status.FAIL
    assert words["stock", "float32"].status is Status.INCONCLUSIVE  # a twin never passes
    engine.recorded = []
    run_faults(large, faults, limits)
    assert engine.recorded == ["slight"]
    with pytest.raises(UsageError, match="no test of them"):
        generate_gates(tmp_path / "gates.toml", tmp_path / "results")
    write_report(tmp_path / "results", tmp_path / "gates.toml")
    assert "| loud |" in (tmp_path / "results" / "calibration.md").read_text()
    with pytest.raises(UsageError, match="other limits"):
        write_report(tmp_path / "results", None)


def test_a_corpus_is_found_where_the_reference_keeps_its_copy(tmp_path: Path) -> None:
    bench(tmp_path)
    found = find_corpus("signoff", "synthetic", tmp_path, print)
    assert found.sha256 == CORPUS.sha256
    save_corpus(SMOKE, tmp_path / "file.parquet")
    assert find_corpus(str(tmp_path / "file.parquet"), "synthetic", tmp_path, print).name == "smoke"


# --------------------------------------------------------------------------- sweeps


def test_a_sweep_is_one_load_and_resumes_with_its_peer(engine: Engine, tmp_path: Path) -> None:
    made = bench(tmp_path)
    jobs = attention_p_jobs(made, ["bf16", "e4m3"])
    assert [job.name for job in jobs] == ["f32", "bf16", "e4m3"]
    variants = Sweep(made, jobs, tmp_path / "sweep").run()
    assert len(engine.loads) == 1
    assert variants["f32"].peer is None
    assert variants["e4m3"].peer is not None
    assert set(variants["e4m3"].greedy) <= {s.id for s in CORPUS.segments}
    assert not (tmp_path / "signoff" / "rows" / "sweep").exists()
    engine.recorded = []
    assert set(Sweep(made, jobs, tmp_path / "sweep").run()) == set(variants)
    assert engine.recorded == []
    (tmp_path / "sweep" / "bf16.json").unlink()
    Sweep(made, jobs, tmp_path / "sweep").run()
    assert engine.recorded == ["attention_p_f32", "attention_p_bf16"]  # the peer's rows were gone


def test_backends_are_loads_of_their_own(tmp_path: Path) -> None:
    made = bench(tmp_path)
    here = backend_jobs(made, ["vec", "naive"], cuda=False)
    assert [job.setting for job in here] == [made.base, made.base]
    assert [bool(job.hooked) for job in here] == [False, True]
    there = backend_jobs(made, ["FLASH_ATTN", "TRITON_ATTN"], cuda=True)
    assert [job.setting.engine["attention_backend"] for job in there] == ["FLASH_ATTN", "TRITON_ATTN"]
    for names_, cuda in ((["vec"], True), ([""], False), (["FLASH_ATTN"], False)):
        with pytest.raises(UsageError, match="expected some of"):
            backend_jobs(made, names_, cuda=cuda)
    with pytest.raises(UsageError, match="e4m3x448"):
        attention_p_jobs(made, ["int8"])


def test_results_name_the_limits_they_were_judged_by(engine: Engine, tmp_path: Path) -> None:
    limits = load_gates(None)
    run_benign(bench(tmp_path), BENIGN[:1], limits)
    stricter = replace(limits, gates=tuple(replace(g, limit=g.limit / 2) for g in limits.gates))
    run_benign(bench(tmp_path), BENIGN[:2], stricter)
    digests = {r.name: r.gates for r in load_results(tmp_path / "results")}
    assert digests["stock"] == digests["v0"] != digests["v1"]
