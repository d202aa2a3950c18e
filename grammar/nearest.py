"""Help texts that suggest the nearest known names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path


def nearest(name: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return up to ``count`` of the known names that are close to ``name``, closest first."""
    candidates = sorted(set(known))
    folded = {candidate.lower(): candidate for candidate in reversed(candidates)}
    return tuple(folded[match] for match in difflib.get_close_matches(name.lower(), folded, count, cutoff=0.6))


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a help text that names the nearest names, or ``otherwise`` if none is near.

    >>> did_you_mean("colum", ["column", "row"])
    'did you mean `column`?'
    """
    close = nearest(name, known)
    return f"did you mean {listed(close, 'or')}?" if close else otherwise


def path_meant(path: Path, fits: Callable[[Path], bool], otherwise: str) -> str:
    """Return a help text with paths that fit and resemble one that does not exist, by its name up to the first dot."""
    stems: dict[str, list[str]] = {}
    for entry in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if fits(entry) and entry.name != path.name:
            stems.setdefault(entry.name.partition(".")[0], []).append(entry.name)
    near = [name for stem in nearest(path.name.partition(".")[0], stems) for name in stems[stem]]
    names = list(dict.fromkeys((*nearest(path.name, near), *near)))[:3]
    return f"did you mean {listed((str(path.parent / name) for name in names), 'or')}?" if names else otherwise


def listed(names: Iterable[str], word: str = "and") -> str:
    """Return names in backticks, joined as in a sentence.

    >>> listed(["dp", "tp"])
    '`dp` and `tp`'
    """
    quoted = [f"`{name}`" for name in names]
    return f" {word} ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
