"""The sources of samples that a plan's ``data`` line names: files, datasets, random samples, a person's callable."""

from __future__ import annotations

import glob
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ...compiler.build.build import Build
from ...compiler.capture.callables import CallableError, check_arguments, load_callable
from ...compiler.initial.counter import normal, stream, uniform
from ...compiler.sizes.size_range import BATCH
from ...grammar.bounded import MOST_JSON, read_bounded
from ...grammar.codes import BAD_DATA
from ...grammar.nearest import did_you_mean
from ..ranks.faults import RunError
from .datasets import dataset_source
from .random_batch import IndexBound, class_bounds
from .samples import DataError, Order, Ordered, SampleSource, asked, check_order, raised_at
from .saved_rows import folder_source
from .token_files import JoinedFiles, Packing, TokenFile, WindowForm, Windows, byte_file, token_file

# ---- the files of globs

_MOST_FOLDERS = 100_000
"""The most folders below the stars of one pattern: links from folder to folder make more ways than there are atoms."""


def matching_files(patterns: Sequence[str], root: Path) -> list[str]:
    """Return the files that the patterns match, each once, sorted, without empty ones. Patterns are globs relative to
    ``root`` (``**`` for any depth); ``{stdlib}`` stands for the folder of the running Python's standard library,
    without the packages installed below it.

    Raises:
        DataError: a pattern matches no file.
    """
    library = sysconfig.get_path("stdlib")
    matches: set[str] = set()
    for pattern in patterns:
        absolute = os.path.join(root, pattern.replace("{stdlib}", glob.escape(library)))
        files = {os.path.normpath(name) for name in _matches(absolute) if os.path.isfile(name)}
        if "{stdlib}" in pattern:  # packages that are installed there differ from machine to machine
            files = {name for name in files if not {"site-packages", "dist-packages"} & set(Path(name).parts)}
        if not files:
            whole = os.path.isabs(absolute if "{stdlib}" in pattern else pattern)
            where, otherwise = ("", "") if whole else (f" in {root}", ", from the plan's folder")
            help_ = _names_meant(pattern, root, _PATTERNS.format(otherwise))
            raise DataError(f'no file matches "{pattern}"{where}', help_, pattern)
        matches |= files
    return sorted(name for name in matches if os.path.getsize(name)) or sorted(matches)[:1]


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches. ``**`` is any depth of folders that are not hidden, as in ``glob``; a
    link that leads back above itself is not followed.

    Raises:
        DataError: the pattern goes into too many folders.
    """
    head, *tails = re.split(r"/\*\*(?=/|$)", pattern, maxsplit=1)
    if not tails:
        yield from glob.iglob(pattern)
        return
    folders = list[str]()
    for root in glob.iglob(head or "/"):
        waiting = [(root, frozenset[str]())] * os.path.isdir(root)
        while waiting:
            folder, above = waiting.pop()
            folders.append(folder)
            if len(folders) > _MOST_FOLDERS:
                raise DataError(f'"{pattern}" goes into more than {_MOST_FOLDERS:,} folders', "name a folder with less")
            above |= {os.path.realpath(folder)}
            with suppress(OSError), os.scandir(folder) as entries:  # what may not be read is left out, as in glob
                below = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                waiting += [(path, above) for path in below if os.path.realpath(path) not in above]
    for folder in folders:
        yield from _matches(f"{glob.escape(folder)}{tails[0] or '/*'}")


def _names_meant(pattern: str, root: Path, otherwise: str) -> str:
    """Return the question "did you mean ...?" with names similar to the first part of a pattern that does not exist;
    ``otherwise`` without such names."""
    for part in Path(pattern).parts:
        if glob.has_magic(part) or not root.is_dir():
            break
        if not (root / part).exists():
            return did_you_mean(part, (entry.name for entry in root.iterdir()), otherwise)
        root /= part
    return otherwise


_PATTERNS = 'name files that are there{}: "texts/*.txt"; `**` goes into all folders below'


def data_files(line: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Return the files that a line of samples reads, by names that do not depend on where a host has them: relative to
    the part of a pattern before its first `*`. Where files of several patterns have one name, the later ones have the
    number of their pattern too.

    Raises:
        DataError: a pattern matches no file.
    """
    files: dict[str, Path] = {}
    for number, pattern in enumerate(line["names"] if line["form"] in ("bytes", "tokens", "folder") else (), 1):
        for name, path in _files_of(pattern, line["form"], folder):
            files[f"{name} ({number})" if files.get(name, path) != path else name] = path
    return files


def _files_of(pattern: str, form: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of one pattern, by names relative to the part of it before its first `*`."""
    place = folder / pattern.replace("{stdlib}", sysconfig.get_path("stdlib"))
    if form == "folder" and place.is_dir():
        saved = sorted(place.glob("*.arrow"))
        yield from ((path.name, path) for path in saved if not path.name.startswith("cache-"))  # of the host's own work
        return
    fixed = next((part for part in (place, *place.parents) if not glob.has_magic(str(part))), folder)
    for path in map(Path, matching_files([pattern], folder)):
        for each in (path, *filter(Path.is_file, [path.with_suffix(".idx")] * (form == "tokens"))):
            yield os.path.relpath(each, fixed.parent if fixed == place else fixed), each


# ---- samples that are functions of their number, without epochs


@final
class CallableData:
    """Samples from a user's function: ``function(number)`` returns a dict of tensors, the same at every call."""

    count: int | None = None

    def __init__(self, function: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._function = function

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number``, as the function returns it.

        Raises:
            DataError: it failed (chained), or returned something else than a dict of tensors.
        """
        help_ = "the function that the plan names failed: call it with this number to see why"
        sample = asked(lambda: self._function(number), f"making sample {number}", help_)
        entries = sample.items() if isinstance(sample, Mapping) else [("", sample)]
        wrong = next((f"{f'`{name}`' if name else 'it'} is {type(value).__name__}" for name, value in entries
                      if not isinstance(value, Tensor)), "")  # fmt: skip
        if wrong or not isinstance(sample, Mapping):
            help_ = "return tensors by the names of inputs, a number as `torch.tensor(3)`"
            raise DataError(f"sample {number} is not a dict of tensors: {wrong or 'it is a tensor'}", help_)
        return dict(sample)


@final
class SyntheticData:
    """Random samples of the plan's inputs, functions of ``seed``, the sample's number and the input's name alone.

    Whole numbers of an input are below its entry in ``bounds``; without one they are 0 or 1.
    """

    count: int | None = None

    def __init__(
        self, inputs: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], bounds: Mapping[str, IndexBound], seed: int
    ) -> None:
        self._inputs, self._sizes, self._bounds, self._seed = inputs, sizes, bounds, seed

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return sample ``number`` >= 0."""
        return {line["name"]: self._drawn(line, number) for line in self._inputs}

    def _drawn(self, line: Mapping[str, Any], number: int) -> Tensor:
        name, dtype = line["name"], getattr(torch, line["dtype"])
        shape = [int(self._sizes.get(dim, dim)) for dim in line["dims"][line["dims"][:1] == [BATCH] :]]
        index = torch.arange(math.prod(shape)).reshape(shape)
        key = stream(self._seed, f"synthetic {name}", number)
        if dtype.is_floating_point:
            return normal(key, index).to(dtype)
        return (uniform(key, index) * self._bounds.get(name, IndexBound(2)).drawn(index)).to(torch.int64).to(dtype)


# ---- the opening of a line's samples


PREDICTED = "--predict"
"""The verb of a line of samples that the command line names; all of them are read, in their own order."""
NO_DATA = "the plan has no `data` line"
NO_DATA_HELP = (
    'add `data synthetic` for random samples that fit the model, or text such as `data bytes "{stdlib}/*.py"`'
)
IGNORE = -100
"""The ignored target where the loss is a callable: torch's default ``ignore_index``."""
_CALLABLE_HELP = {
    "callable": "name a function of a sample's number that returns a dict of tensors, as `def sample(number)`; or, by"
    ' `data dataset "{}"`, one that returns a dataset',
    "dataset": "name a function that returns the dataset, as `def train(): return ...`, or its class",
}
"""The advice for a line whose callable is not one for samples, by the line's form."""


@dataclass(frozen=True)
class Wanted:
    """The samples that a line wants, as a manifest has it, and the facts of its plan: ``inputs``, ``loss``, ``sizes``,
    ``seed``, and the names of the inputs that are ``needed``, where these are not all. Names of files are relative to
    ``folder``; ``bounds`` say which rows or classes inputs may name."""

    line: Mapping[str, Any]
    facts: Mapping[str, Any]
    folder: Path
    bounds: Mapping[str, IndexBound] = field(default_factory=dict)

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """The plan's ``input`` lines."""
        return self.facts["inputs"]  # type: ignore[no-any-return]

    @property
    def batch(self) -> int:
        """The samples of a step."""
        return int(self.facts["sizes"].get(BATCH, 1))

    def function(self, positional: int) -> Callable[..., Any]:
        """Return the line's callable, bound to the line's arguments; it takes so many ``positional`` ones more.

        Raises:
            CallableError: it cannot be loaded, or takes other arguments.
        """
        target, arguments = self.line["callable"], self.line["arguments"]
        try:
            function = load_callable(target, self.folder)
            check_arguments(function, target, arguments, positional)
        except CallableError as error:
            if error.__cause__ is None:  # no code failed: the line names something else than was meant
                error.help = error.help or _CALLABLE_HELP[self.line["form"]].format(target)
            raise
        return lambda *values: function(*values, **arguments)

    def windows(self) -> WindowForm:
        """Return the form of windows of tokens: the inputs that get them, and their length."""
        operands = [name for term in self.facts["loss"] for name in term["operands"]]
        names = token_inputs(self.inputs, operands)
        tokens, targets = names.get("tokens", "tokens"), names.get("targets", "targets" if operands else None)
        targets = targets if targets in self.facts.get("needed", (targets,)) else None
        dims = next((line["dims"] for line in self.inputs if line["name"] == tokens), self.inputs[0]["dims"])
        length = int(self.facts["sizes"].get(dims[-1], dims[-1])) if dims else 0
        ignored = (term["ignore"] for term in self.facts["loss"] if targets in term["operands"])
        ignore = next((number for number in ignored if number is not None), IGNORE)
        packing = Packing(ignore, self.line.get("end")) if self.line.get("pack") else None
        return WindowForm(length, tokens, targets, packing)

    @property
    def packed(self) -> WindowForm | None:
        """The form of windows if documents are packed into them, None if entries are samples themselves."""
        return self.windows() if self.line.get("pack") else None


def _text(wanted: Wanted, files: Sequence[TokenFile], unit: str) -> SampleSource:
    text, form = JoinedFiles(files), wanted.windows()
    ends = form.packing is not None and form.packing.end is None
    if unit == "tokens" and ends and len(files) == 1 and files[0].starts is None:
        message = f"nothing says where documents end in {files[0].path}"
        raise DataError(message, "name the token that ends one, as `pack end 50256`", files[0].path)
    return Windows(text, form, f"{len(files)} file{'s' * (len(files) != 1)} hold {text.size} {unit}")


def _open_bytes(wanted: Wanted) -> SampleSource:
    files = matching_files(wanted.line["names"], wanted.folder)
    return _text(wanted, [byte_file(path) for path in files], "bytes")


def _open_tokens(wanted: Wanted) -> SampleSource:
    files = matching_files(wanted.line["names"], wanted.folder)
    names = [path for path in files if not (path.endswith(".idx") and f"{path[:-4]}.bin" in files)]
    return _text(wanted, [token_file(path, wanted.line.get("dtype")) for path in names], "tokens")


def _open_dataset(wanted: Wanted) -> SampleSource:
    function = wanted.function(0)

    def make() -> Any:
        return asked(
            function, "making the dataset", "the function that the plan names failed: call it without parc to see why"
        )

    source = dataset_source(make(), make, wanted.inputs, wanted.batch, wanted.packed)
    if source.count is None and (word := next((word for word in ("shuffle", "split") if word in wanted.line), "")):
        message = f"an iterable has an order of its own and no length, so there is no `{word}`"
        raise DataError(message, f"remove `{word}`, or return a dataset with `__getitem__` and `__len__`")
    return source


OPENERS: Mapping[str, Callable[[Wanted], SampleSource]] = {
    "bytes": _open_bytes,
    "tokens": _open_tokens,
    "dataset": _open_dataset,
    "folder": lambda w: folder_source(w.folder / w.line["names"][0], w.inputs, w.packed),
    "callable": lambda w: CallableData(w.function(1)),
    "synthetic": lambda w: SyntheticData(w.inputs, w.facts["sizes"], w.bounds, int(w.facts["seed"])),
}
"""The function that opens a source, by the form of the line. None of them reads a sample."""
OWN_CODE = ("callable", "dataset")
"""The forms whose samples come from a person's code, so that they may differ from rank to rank."""


def open_data(wanted: Wanted, evaluates: bool = False) -> SampleSource:
    """Return the samples of a line, without end, in their order, by the plan's inputs. For one that ``evaluates`` they
    are those that its ``split`` keeps for evaluation, or all without one; they need not fill a batch. ``count`` is the
    number of an epoch.

    Raises:
        CallableError: the callable cannot be loaded, or takes other arguments.
        DataError: a glob matches no file, files do not hold what the line says, or there are too few samples.
    """
    source, line = OPENERS[wanted.line["form"]](wanted), wanted.line
    if source.count is None:
        return source
    predicted, held = wanted.facts.get("said") == PREDICTED, evaluates and "split" in line
    shuffled = not predicted and (bool(line.get("shuffle")) or line["form"] == "bytes")
    order = Order(source.count, int(wanted.facts["seed"]), shuffled and not held, float(line.get("split", 0)), held)
    check_order(order, 1 if evaluates else wanted.batch)
    return Ordered(source, order)


def make_data(build: Build) -> SampleSource:
    """Return the samples that a build reads; if it evaluates, those that a ``split`` keeps for evaluation.

    Raises:
        RunError: the plan has no data, or it cannot be read.
    """
    manifest, line = build.manifest, build.manifest["data"]
    if line is None:
        raise RunError(BAD_DATA, NO_DATA, NO_DATA_HELP)
    try:
        return open_data(Wanted(line, manifest, build.folder, class_bounds(build.reference)), not build.trains)
    except (CallableError, DataError) as error:
        notes = [note for note in (line_of(build), raised_at(error)) if note]
        message = f"the data's callable: {error}" if isinstance(error, CallableError) else str(error)
        raise RunError(BAD_DATA, message, error.help, notes) from error


def line_of(build: Build, verb: str = "") -> str:
    """Return the place and the text of the first line of the build's plan that has a ``verb``, or that names its
    samples, or "" if there is none."""
    verb = verb or build.manifest.get("said", "data")
    try:
        lines = read_bounded(build.path / "plan.parc", MOST_JSON).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    matching = ((number, text) for number, text in enumerate(lines, 1) if text.split()[:1] == [verb])
    return next((f"line {number} of the build's plan.parc: {' '.join(text.split())}" for number, text in matching), "")


def token_inputs(inputs: Sequence[Mapping[str, Any]], operands: Sequence[str]) -> dict[str, str]:
    """Return the inputs that take tokens and targets, the token after each: by their names, or else by their use in the
    plan.

    >>> ids, labels = {"name": "input_ids", "dtype": "int64"}, {"name": "labels", "dtype": "int64"}
    >>> token_inputs([labels, ids], ["output.logits", "labels"])
    {'targets': 'labels', 'tokens': 'input_ids'}
    """
    whole = [line["name"] for line in inputs if line["dtype"].startswith("int")]
    chosen = {name: name for name in ("tokens", "targets") if name in whole}
    for kind, choices in (("targets", [n for n in whole if n in operands]),
                          ("tokens", [n for n in whole if n not in operands])):  # fmt: skip
        free = [name for name in choices if name not in chosen.values()]
        if kind not in chosen and free:
            chosen[kind] = free[0]
    return chosen
