"""A verdict as a comment on a pull request: GitHub's Markdown, at most `MOST_LINES` lines whatever was compared.

Text of recordings and corpora is shown and never obeyed: every character that Markdown or HTML could read is an entity,
and what would notify someone or link somewhere is taken apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from harness.report import cells, strata
from harness.report.visible import visible
from harness.types import Comparison, Stratum, Verdict
from harness.worst import PositionDetail, TopId

MOST_LINES = 59
"""Lines of the longest comment."""

COLUMNS = ("mean", "ratio to floor (95 %)", "flips", "flip margin")
MOST_FACTS, MOST_STRATA, MOST_WORST, MOST_NOTES = 6, 14, 5, 5
SENTENCE, CONTEXT, TOKEN = 400, 60, 16  # characters shown of one

_PLAIN = frozenset(" -.,:/()%+=;'\"")
_BREAK = "&#8203;"  # zero width: a mention or an issue number split by it notifies nobody and links nowhere


def to_markdown(comparison: Comparison, verdict: Verdict, worst: Sequence[PositionDetail] = ()) -> str:
    """The comment. `worst` comes from `worst.worst_positions`; the first few are shown."""
    return _joined(
        _heading(verdict.word),
        _answer(cells.facts(comparison, verdict), verdict.remedy),
        _table_of_strata(comparison, verdict),
        _worst(worst[:MOST_WORST]),
        _compared(comparison, verdict),
    )


def no_judgement(word: str, message: str) -> str:
    """The comment where nothing could be compared, and why."""
    return _joined(_heading(word), _answer([message], ""))


def escaped(text: str, most: int = SENTENCE) -> str:
    """One line of text, its first `most` characters, that Markdown and HTML show as it is."""
    shown = visible(text[: most + 1])
    cut = shown if len(shown) <= most else shown[: most - 1] + "…"
    return _entities(cut)


# --------------------------------------------------------------------------- parts


def _heading(word: str) -> Iterator[str]:
    yield f"## logitgate: {escaped(word)}"


def _answer(facts: Sequence[str], remedy: str) -> Iterator[str]:
    yield from (f"- {escaped(fact)}" for fact in facts[:MOST_FACTS])
    if len(facts) > MOST_FACTS:
        yield f"- and {len(facts) - MOST_FACTS} more"
    if remedy:
        yield f"- **What would decide it**: {escaped(remedy)}"


def _table_of_strata(comparison: Comparison, verdict: Verdict) -> Iterator[str]:
    every = strata.strata(verdict)
    shown = _chosen(verdict, every)
    if not shown:
        return
    yield from _head(("KL20 (nat)", *COLUMNS), numbers=len(COLUMNS))
    for stratum in shown:
        found = cells.cells(comparison, verdict, stratum)
        yield _row([escaped(str(stratum)), *(found[column] for column in COLUMNS)])
    if len(every) > len(shown):
        yield _row([f"and {len(every) - len(shown)} more", *[""] * len(COLUMNS)])


def _chosen(verdict: Verdict, every: Sequence[Stratum]) -> list[Stratum]:
    """What fits: sums first, then the cells farthest from the floor (from zero, without one), in the usual order."""

    def weight(stratum: Stratum) -> tuple[bool, float]:
        ratio = strata.value(verdict, stratum, "ratio_to_floor")
        size = strata.value(verdict, stratum, "mean") if math.isnan(ratio) else ratio
        return stratum.kind is not None, -size if math.isfinite(size) else -math.inf

    kept = set(sorted(every, key=weight)[:MOST_STRATA])
    return [stratum for stratum in every if stratum in kept]


def _worst(worst: Sequence[PositionDetail]) -> Iterator[str]:
    if not worst:
        return
    rows = [
        _row(
            [
                escaped(f"{one.segment} {one.phase} {one.index}", CONTEXT),
                f"{one.kl20:.3g}",
                f"{one.margin:.3g}{' flip' if one.flip else ''}",
                f"{_code(_end(one.context, CONTEXT))} → {_code(_end(one.target_text, TOKEN))}",
                _tops(one.top_reference),
                _tops(one.top_candidate),
            ]
        )
        for one in worst
    ]
    columns = ("where", "KL20", "margin", "context → target", "reference", "candidate")
    yield from _details("Worst positions", [*_head(columns, numbers=0), *rows])


def _compared(comparison: Comparison, verdict: Verdict) -> Iterator[str]:
    rows = [
        _row([role, f"{_code(_end(side.path, 3 * CONTEXT))} {escaped(cells.described(side))}"])
        for role, side in cells.sides(comparison)
    ]
    if comparison.spread:
        rows.append(_row(["spread", escaped(", ".join(comparison.spread))]))
    rows.append(_row(["positions", escaped(cells.positions(comparison))]))
    rows.append(_row(["numbers", escaped(cells.direction(comparison))]))
    notes = [*comparison.notes, *verdict.notes]
    rows += [_row(["note", escaped(note)]) for note in notes[:MOST_NOTES]]
    if len(notes) > MOST_NOTES:
        rows.append(_row(["note", f"and {len(notes) - MOST_NOTES} more"]))
    yield from _details("What was compared", [*_head(("", ""), numbers=0), *rows])


# --------------------------------------------------------------------------- Markdown


def _joined(*parts: Iterable[str]) -> str:
    """Parts separated by empty lines; empty parts leave nothing behind."""
    return "\n\n".join(text for part in parts if (text := "\n".join(part))) + "\n"


def _details(summary: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (f"<details><summary>{summary}</summary>", "", *lines, "</details>")


def _head(columns: Sequence[str], *, numbers: int) -> Iterator[str]:
    """A table's first lines; the last `numbers` columns are aligned to the right."""
    yield _row(columns)
    yield _row(["---"] * (len(columns) - numbers) + ["--:"] * numbers)


def _row(columns: Iterable[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _tops(tops: Sequence[TopId]) -> str:
    return ", ".join(f"{_code(_end(top.text, TOKEN))} {math.exp(top.logprob):.1%}" for top in tops[:3])


def _end(text: str, most: int) -> str:
    """The end of a text, as `escaped` writes it: of a context the last words matter."""
    return _entities(visible(text, most))


def _code(entities: str) -> str:
    return f"<code>{entities}</code>"


def _entities(line: str) -> str:
    """A line without hidden characters; addresses are taken apart, since "www." alone makes a link."""
    plain = "".join(map(_entity, line))
    return re.sub(r"(?<=www)\.|:(?=//)", lambda found: f"&#{ord(found[0])};", plain, flags=re.IGNORECASE)


def _entity(character: str) -> str:
    if character.isalnum() or character in _PLAIN:
        return character
    return f"&#{ord(character)};{_BREAK if character in '@#' else ''}"
