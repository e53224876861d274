from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.corpus import (
    build_corpus,
    check_fits,
    cut_document,
    load_corpus,
    load_manifest,
    save_corpus,
    seal,
    tokenizer_facts,
)
from harness.corpus_sources import Cut, SourceSpec, parse_manifest, read_text
from harness.errors import StorageError, UsageError
from harness.types import Corpus, Phase, Segment, Source

CUT = Cut(depths=(4, 9), documents=1, decode_rows=3, prefill_rows=2, both_phases_at=(4,))


class Bytes:
    """A tokenizer of UTF-8 bytes; id 256 is BOS. Its decoder drops a leading space, as SentencePiece's does."""

    def __init__(self, *, bos: bool = True, adds_bos: bool = False) -> None:
        self.bos_token_id = 256 if bos else None
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        return [256] * (self.adds_bos and add_special_tokens) + list(text.encode("utf-8"))

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("latin-1").removeprefix(" ")

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(257)}


def table(**changes: Any) -> dict[str, Any]:
    cut = {"depths": [4, 9], "documents": 1, "decode_rows": 3, "prefill_rows": 2, "both_phases_at": [4]}
    source = {"kind": "prose", "origins": ["path:a.txt"], "licence": "CC0-1.0"}
    return {"name": "tiny", "version": "1", "cut": cut, "source": [source]} | changes


def build(folder: Path, text: str, tokenizer: Any = None, **changes: Any) -> Corpus:
    (folder / "a.txt").write_text(text, encoding="utf-8", newline="")
    manifest = parse_manifest(table(**changes), folder=folder, where="test")
    return build_corpus(manifest, tokenizer or Bytes(), tokenizer_name="bytes")


def segment(**changes: Any) -> Segment:
    plain = Segment(
        id="a", document="a", kind="code", depth=3, token_ids=np.arange(6, dtype=np.int32), decode_from=3,
        windows=((1, 3),),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def corpus(*segments: Segment, **changes: Any) -> Corpus:
    plain = Corpus(
        name="tiny", version="1", tokenizer="t", tokenizer_sha256="ab", vocab_size=10, bos="none", smoke=False,
        segments=segments or (segment(),), sources=(),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


# --------------------------------------------------------------------------- cutting


def test_every_depth_forces_the_same_tokens_and_has_its_own_context() -> None:
    shallow, deep = cut_document(np.arange(100, 140, dtype=np.int32), "d", "code", CUT)
    assert deep.token_ids.tolist() == list(range(100, 113))
    assert shallow.token_ids.tolist() == list(range(105, 113))
    for s in (shallow, deep):
        rows = s.indices(Phase.DECODE)
        assert s.decode_from == s.depth == rows[0]
        assert len(rows) == 3
        assert s.targets(rows).tolist() == [110, 111, 112]


def test_windows_end_where_decode_begins_but_for_both_phases() -> None:
    shallow, deep = cut_document(np.arange(40, dtype=np.int32), "d", "code", CUT)
    assert shallow.windows == ((2, 7),)
    assert deep.windows == ((7, 9),)
    assert set(shallow.indices(Phase.DECODE)) < set(shallow.indices(Phase.PREFILL))


def test_a_bos_is_counted_in_the_depth_and_leaves_the_forced_tokens_alone() -> None:
    segments = cut_document(np.arange(40, dtype=np.int32), "d", "code", CUT, bos_id=77)
    for s in segments:
        assert s.token_ids[0] == 77
        assert len(s.token_ids) == s.depth + 3 + 1
    assert [s.token_ids[-4:].tolist() for s in segments] == [[8, 9, 10, 11]] * 2


@given(
    depths=st.lists(st.integers(1, 50), min_size=1, max_size=4, unique=True).map(sorted),
    decode=st.integers(0, 20),
    bos=st.none() | st.just(999),
    data=st.data(),
)
def test_cuts_hold_at_any_size(depths: list[int], decode: int, bos: int | None, data: st.DataObject) -> None:
    prefill = data.draw(st.integers(0 if decode else 1, depths[0]))
    both = tuple(data.draw(st.lists(st.sampled_from(depths), unique=True)))
    cut = Cut(depths=tuple(depths), documents=1, decode_rows=decode, prefill_rows=prefill, both_phases_at=both)
    need = depths[-1] + decode + 1 - (bos is not None)
    made = cut_document(np.arange(need, dtype=np.int32), "d", "code", cut, bos)
    seal(corpus(*made, vocab_size=1000))  # what a recording can hold
    for s in made:
        assert len(s.indices(Phase.DECODE)) == decode
        assert len(s.indices(Phase.PREFILL)) == prefill + decode * (s.depth in both)
        np.testing.assert_array_equal(s.token_ids[s.decode_from :], made[-1].token_ids[made[-1].decode_from :])
    with pytest.raises(UsageError, match=rf"{need - 1:,} tokens and needs {need:,}"):
        cut_document(np.arange(need - 1, dtype=np.int32), "d", "code", cut, bos)


# --------------------------------------------------------------------------- building


def test_building_says_what_it_did(tmp_path: Path) -> None:
    made = build(tmp_path, "abcdefghijklmnopqrst", smoke=True)
    assert [s.id for s in made.segments] == ["prose-01-d4", "prose-01-d9"]
    assert bytes(made.segments[1].token_ids.tolist()) == b"abcdefghijklm"
    assert made.rows == (2 + 3 + 3) + (2 + 3)
    digest = hashlib.sha256(b"abcdefghijklmnopqrst").hexdigest()
    assert made.sources == (Source(document="prose-01", origin="path:a.txt", licence="CC0-1.0", sha256=digest),)
    assert (made.vocab_size, made.smoke, len(made.sha256)) == (257, True, 64)
    assert made.pieces[ord(" ")] == " "
    assert made.pieces[256] == ""


@pytest.mark.parametrize(
    ("bos", "tokenizer", "first", "words"),
    [
        ("none", Bytes(adds_bos=True), False, "none: .*by itself adds id 256"),
        ("tokenizer", Bytes(adds_bos=False), False, "none: .*nor does"),
        ("tokenizer", Bytes(adds_bos=True), True, "first: id 256 .*as the tokenizer does"),
        ("first", Bytes(adds_bos=False), True, "first: id 256 .*by itself does not"),
    ],
)
def test_bos_is_stated(tmp_path: Path, bos: str, tokenizer: Bytes, first: bool, words: str) -> None:
    made = build(tmp_path, "x" * 30, tokenizer, bos=bos)
    assert all((s.token_ids[0] == 256) == first and len(s.token_ids) == s.depth + 4 for s in made.segments)
    assert re.match(words, made.bos)


def test_bos_first_needs_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no BOS"):
        build(tmp_path, "x" * 30, Bytes(bos=False), bos="first")


def test_a_short_source_is_named_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"path:a\.txt: the text has 12 tokens and needs 13 for depth 9"):
        build(tmp_path, "x" * 12)


def test_long_texts_are_encoded_in_part_with_the_same_ids(tmp_path: Path) -> None:
    class Counting(Bytes):
        longest = 0

        def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
            self.longest = max(self.longest, len(text))
            return list(text.replace(" " * 40, "\t").encode())  # forty characters a token: the first guess is short

    counting, text = Counting(), (" " * 40 + "ab") * 2_000
    made = build(tmp_path, text, counting)
    assert made.segments[1].token_ids.tolist() == list(b"\tab\tab\tab\tab\t")
    assert 13 * 8 < counting.longest < len(text) / 10


def test_only_the_first_documents_of_each_kind_are_used(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("y" * 30)
    sources = [{"kind": k, "origins": [f"path:{f}.txt"], "licence": "x"} for k, f in ("pa", "qb", "pb", "qa")]
    made = build(tmp_path, "x" * 30, source=sources)
    assert [(s.document, s.origin) for s in made.sources] == [("p-01", "path:a.txt"), ("q-01", "path:b.txt")]


# --------------------------------------------------------------------------- manifests and texts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"version": 1}, "version is 1; expected a str"),
        ({"smoke": 1}, "smoke is 1; expected a bool"),
        ({"name": "../x"}, "name is '../x'"),
        ({"bos": "last"}, "bos is 'last'"),
        ({"source": []}, r"no \[\[source\]\]"),
        ({"source": [3]}, "number 1 is 3; expected a table"),
        ({"cut": table()["cut"] | {"deeps": 1}}, r"\[cut\]: unknown key 'deeps'"),
        ({"cut": table()["cut"] | {"depths": [9, 4]}}, "ascending"),
        ({"cut": table()["cut"] | {"depths": [True]}}, "depths holds True"),
        ({"cut": table()["cut"] | {"prefill_rows": 5}}, "do not fit the least depth, 4"),
        ({"cut": table()["cut"] | {"decode_rows": -1}}, "decode_rows is -1"),
        ({"cut": table()["cut"] | {"both_phases_at": [5]}}, "both_phases_at has 5"),
        ({"cut": table()["cut"] | {"documents": 2}}, "kind 'prose' has 1 .* asks for 2"),
        ({"source": [{"kind": "p", "licence": "x"}]}, "number 1: the key 'origins' is missing"),
        ({"source": [{"kind": "p", "licence": "x", "origins": ["ftp://a/b"]}]}, "unknown origin 'ftp://a/b'"),
        ({"source": [{"kind": "p", "licence": "x", "origins": ["https://a/b"]}]}, "with its sha256"),
        ({"source": [{"kind": "p", "licence": "x", "origins": ["path:a"], "sha256": "00"}]}, "64 lower-case"),
    ],
)
def test_bad_manifests_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_manifest(table(**changes), folder=Path(), where="test.toml")


@pytest.mark.parametrize("name", ["quick", "embedded", "essay"])
def test_packaged_manifests_load(name: str) -> None:
    assert load_manifest(name).name == name


def test_unknown_and_unreadable_manifests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packaged are embedded, essay, hybrid, hybrid-decode, hybrid-quick, quick"):
        load_manifest("nope")
    with pytest.raises(UsageError, match=r"absent\.toml"):
        load_manifest(str(tmp_path / "absent.toml"))
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(UsageError, match=r"bad\.toml"):
        load_manifest(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize("name", ["quick", "embedded"])
def test_texts_of_the_shipped_corpora_are_long_and_share_nothing(name: str) -> None:
    """At four and a half characters a token, more than pydoc's prose has, every text reaches the deepest cut."""
    manifest = load_manifest(name)
    texts = [read_text(source, folder=manifest.folder) for source in manifest.sources]
    need = manifest.cut.depths[-1] + manifest.cut.decode_rows + 1
    assert min(map(len, texts)) > need * (4.5 if name == "embedded" else 1.0)
    pieces = [{text[i : i + 120] for i in range(0, min(len(text), need * 5) - 120)} for text in texts]
    assert all(not a & b for n, a in enumerate(pieces) for b in pieces[:n])


def spec(*origins: str, sha256: str | None = None) -> SourceSpec:
    return SourceSpec(kind="k", origins=origins, licence="l", sha256=sha256)


def test_origins(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    (texts / "sub" / "b.txt").write_bytes("\ufeffé\r\n".encode())
    (texts / "sub" / "a.txt").write_bytes(b"A")
    assert read_text(spec("texts:sub/*.txt", "texts:sub/a.txt"), folder=tmp_path, texts=texts) == "A\ufeffé\r\nA"
    assert read_text(spec(f"path:{texts}/sub/a.txt"), folder=Path("/nowhere")) == "A"
    assert read_text(spec(f"path:{texts}/s*/a.txt"), folder=Path("/nowhere")) == "A"
    assert "def loads(" in read_text(spec("cpython:json/__init__.py"), folder=tmp_path)
    assert "statement" in read_text(spec("pydoc_data.topics:assert"), folder=tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (spec("texts:none.txt"), "is not in the folder of texts"),
        (spec("texts:../secret.txt"), "leads out of its folder"),
        (spec("texts:/etc/hostname"), "leads out of its folder"),
        (spec("cpython:no/such.py"), "standard library"),
        (spec("pydoc_data.topics:nonsense"), "no topic 'nonsense'"),
        (spec("texts:latin.txt"), "not UTF-8: byte 1"),
        (spec("texts:good.txt", sha256="0" * 64), "other text"),
    ],
)
def test_missing_and_wrong_texts(tmp_path: Path, source: SourceSpec, message: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a\xe9")
    (tmp_path / "good.txt").write_bytes(b"good")
    with pytest.raises(UsageError, match=message):
        read_text(source, folder=tmp_path, texts=tmp_path)


def test_texts_without_their_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--texts DIR"):
        read_text(spec("texts:a.txt"), folder=tmp_path)


class Network:
    """Stands in for urllib's opener and counts what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        self.calls, self.data = 0, data
        monkeypatch.setattr("urllib.request.urlopen", self)

    def __call__(self, url: str, timeout: float) -> Network:
        self.calls += 1
        return self

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> bytes:
        return self.data


def test_urls_are_fetched_only_when_asked_and_kept_only_when_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, b"text")
    right = spec("https://h/x/a.txt?raw=1", sha256=hashlib.sha256(b"text").hexdigest())
    wrong = spec("https://h/x/b.txt", sha256="0" * 64)
    with pytest.raises(UsageError, match="--fetch"):
        read_text(right, folder=tmp_path, texts=tmp_path)
    assert network.calls == 0
    with pytest.raises(UsageError, match="other text"):
        read_text(wrong, folder=tmp_path, texts=tmp_path, fetch=True)
    assert list(tmp_path.iterdir()) == []
    assert read_text(right, folder=tmp_path, texts=tmp_path, fetch=True) == "text"
    assert read_text(right, folder=tmp_path, texts=tmp_path) == "text"
    assert network.calls == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


# --------------------------------------------------------------------------- the file


def test_a_corpus_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    hostile = ("\ud800", "</script>", "\x1b[31m", "\0", "\u202e", "é" * 10_000)
    source = Source(document="a", origin="path:\udcff\n", licence="\ud83d", sha256="")
    made = seal(
        corpus(
            segment(), segment(id="b", windows=()), segment(id="c", windows=((0, 2), (3, 5))),
            name="\udc80", sources=(source,), pieces=hostile, sampling={"temperature": 0.1, "prompt": "\ud800"},
        )
    )  # fmt: skip
    save_corpus(made, tmp_path / "deep" / "c.parquet")
    back = load_corpus(tmp_path / "deep" / "c.parquet")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c.parquet"]
    for ours, theirs in zip(made.segments, back.segments, strict=True):
        assert theirs.token_ids.dtype == np.int32
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    bare = np.empty(0, np.int32)
    strip = [tuple(dataclasses.replace(s, token_ids=bare).windows for s in c.segments) for c in (made, back)]
    assert strip[0] == strip[1]
    assert dataclasses.replace(back, segments=()) == dataclasses.replace(made, segments=())


def test_the_identity_covers_what_decides_rows_and_nothing_else() -> None:
    plain = seal(corpus()).sha256
    ids = segment().token_ids.copy()
    ids[2] = 7
    different = [
        corpus(name="other"),
        corpus(version="2"),
        corpus(tokenizer_sha256="cd"),
        corpus(vocab_size=11),
        corpus(bos="first"),
        corpus(smoke=True),
        corpus(sampling={"seed": 1}),
        *(
            corpus(segment(**change))
            for change in (
                {"id": "z"}, {"document": "z"}, {"kind": "z"}, {"depth": 4}, {"token_ids": ids}, {"decode_from": 4},
                {"windows": ((0, 3),)},
            )
        ),
    ]  # fmt: skip
    hashes = {seal(c).sha256 for c in different}
    assert len(hashes | {plain}) == len(different) + 1
    same = corpus(pieces=("a",), sources=(Source(document="a", origin="b", licence="c", sha256="d"),), tokenizer="u")
    assert seal(same).sha256 == plain
    # written out: another form makes every corpus in the world another one; raise SCHEMA_VERSION if that is meant
    form = (
        '{"bos":"none","name":"tiny","sampling":null,"segments":[{"decode_from":3,"depth":3,"document":"a","id":"a",'
        '"kind":"code","token_ids":[0,1,2,3,4,5],"windows":[[1,3]]}],"smoke":false,"tokenizer_sha256":"ab",'
        '"version":"1","vocab_size":10}'
    )
    assert plain == hashlib.sha256(form.encode()).hexdigest()


def rewrite(path: Path, change: Any) -> None:
    """Change a corpus file's table behind its back."""
    pq.write_table(change(pq.read_table(path)), path)


def replace_ids(t: pa.Table) -> pa.Table:
    column = pa.array([[0, 1, 2, 3, 4, 9]], pa.list_(pa.int32()))
    return t.set_column(t.schema.get_field_index("token_ids"), "token_ids", column)


def edit_facts(**changes: Any) -> Any:
    def change(t: pa.Table) -> pa.Table:
        facts = json.loads(t.schema.metadata[b"logitgate.corpus"]) | changes
        kept = {k: v for k, v in facts.items() if v is not None or k == "sampling"}
        return t.replace_schema_metadata(t.schema.metadata | {b"logitgate.corpus": json.dumps(kept)})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_ids, "was altered"),
        (edit_facts(smoke=True), "was altered"),
        (edit_facts(schema_version=99), "newer logitgate"),
        (edit_facts(vocab_size=None), "damaged"),
        (edit_facts(vocab_size=5), r"damaged.*token id outside 0 \.\. 4"),
        (edit_facts(surprise=1), "damaged"),
        (lambda t: t.drop(["windows"]), "damaged"),
        (lambda t: t.slice(0, 0), "damaged"),
        (lambda t: t.replace_schema_metadata({}), "not a corpus"),
    ],
)
def test_altered_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "c.parquet"
    save_corpus(seal(corpus()), path)
    rewrite(path, lambda t: t)
    load_corpus(path)  # identity is the content's, not the bytes'
    rewrite(path, change)
    with pytest.raises(StorageError, match=message):
        load_corpus(path)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    with pytest.raises(StorageError, match="there is no corpus file"):
        load_corpus(path)
    save_corpus(seal(corpus()), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StorageError, match="not a readable Parquet file"):
        load_corpus(path)
    with pytest.raises(StorageError, match="cannot write"):
        save_corpus(seal(corpus()), path / "below-a-file.parquet")


def test_duckdb_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    save_corpus(seal(corpus()), path)
    query = "select id, depth, decode_from, len(token_ids), token_ids[1], windows[1].stop from read_parquet(?)"
    assert duckdb.execute(query, [str(path)]).fetchall() == [("a", 3, 3, 6, 0, 3)]


@pytest.mark.parametrize(
    "bad",
    [
        {"decode_from": 0},
        {"decode_from": 6},
        {"windows": ((2, 2),)},
        {"windows": ((3, 6),)},
        {"windows": ((2, 4), (3, 5))},
        {"windows": ((-1, 2),)},
        {"token_ids": np.array([0, 1, 2, 3, 4, 10], np.int32)},
        {"token_ids": np.array([0, 1, 2, -1, 4, 5], np.int32)},
        {"id": "a b"},
        {"kind": "\ud800"},
        {"document": ""},
    ],
)
def test_segments_that_no_recording_could_hold_are_refused(bad: dict[str, Any]) -> None:
    if bad.get("windows") == ((3, 6),):
        seal(corpus(segment(windows=((3, 5),))))  # the last row is L - 2: this one fits
    with pytest.raises(UsageError):
        seal(corpus(segment(**bad)))


def test_segment_ids_are_unique() -> None:
    with pytest.raises(UsageError, match="two of one id"):
        seal(corpus(segment(), segment()))


# --------------------------------------------------------------------------- fit


def test_fit() -> None:
    c = corpus(segment(), segment(id="long", token_ids=np.arange(8, dtype=np.int32)))
    check_fits(c, max_positions=8, vocab_size=8, tokenizer_sha256=None)
    check_fits(c, max_positions=8, vocab_size=8, tokenizer_sha256="ab")
    with pytest.raises(UsageError, match=r"context is 7 tokens; 1 of 2 segments .* long has 8"):
        check_fits(c, max_positions=7, vocab_size=8, tokenizer_sha256=None)
    with pytest.raises(UsageError, match=r"token id 7, .* below 7"):
        check_fits(c, max_positions=8, vocab_size=7, tokenizer_sha256=None)
    with pytest.raises(UsageError, match="tokenizer is another one"):
        check_fits(c, max_positions=8, vocab_size=8, tokenizer_sha256="cd")


def test_facts_of_a_fast_tokenizer_do_not_depend_on_its_state() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def make(extra: str) -> Any:
        core = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab={"Ġ": 0, "a": 1, "Ġa": 2, extra: 5}, merges=[("Ġ", "a")])
        )
        core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = tokenizers.decoders.ByteLevel()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=core)

    tokenizer = make("b")
    before = tokenizer_facts(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert tokenizer_facts(tokenizer) == before
    assert before[1:] == (6, (" ", "a", " a", "", "", "b"))
    assert tokenizer_facts(make("c"))[0] != before[0]
