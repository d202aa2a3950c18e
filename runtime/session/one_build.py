"""One build on every rank: programs, code, software, options and files, compared before the first step.

Each host may have a build of its own, and a copy of each file. Two builds of one mesh exchange messages of equal
shapes, so a mixture of them would train to its end. One exchange brings a hash of every rank; only where hashes differ
do ranks send what they hash.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch

from ...compiler.build.build import Build, sources_of
from ...compiler.build.directory import LINES, unlined
from ...compiler.build.first_check import is_of_first_check
from ...compiler.capture.callables import CallableError
from ...compiler.capture.model_code import file_hashes
from ...grammar.bounded import check_regular
from ...grammar.codes import RANKS_DIFFER
from ..data.samples import DataError
from ..data.sources import PREDICTED, data_files
from ..ranks.faults import RunError
from ..ranks.gather import of_every_role
from ..ranks.lockstep import Lockstep, ranks_text
from ..ranks.wire import sendable
from ..state.opening import check_source_of

_PROBE = 64 << 10
"""The bytes at the head and at the tail of a file that are hashed."""
_SHOWN = 40
"""The most characters of a fact that a message shows."""
_MOST_NOTES = 6
_CODE = "the code of"
_LAYERS = ("runtime", "compiler", "grammar")
"""The parts of parc that run on a rank."""
_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables of the environment that change the products of a GPU behind torch's own settings."""
_SETTINGS = (
    "backends.fp32_precision", "backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.deterministic", "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", "backends.mkldnn.enabled",
    "backends.mkldnn.matmul.fp32_precision",
)  # fmt: skip
_SETTING_CALLS = ("are_deterministic_algorithms_enabled", "get_default_dtype")
_UNCOMPARED = frozenset({"budget", "files", "folder", "model_lines", "model_source", "parc"})
"""The keys of a manifest that are compared otherwise, or that change no number: where the plan's folder is, the lines
on which the model's code stands, and the parc that made the build."""
_NAMED_HERE = frozenset({"names", "callable"})
"""The places of samples that the command line names, which are relative to each host's current folder."""
_PROMISES = frozenset({"budget", "expect", "forbid", "verify"})
"""The verbs of lines that change nothing of what a plan compiles to."""
_PROSE = frozenset({"plan.parc", "report.json"})
"""The files of a build that no rank computes with; all that matters of them is in the others."""


@sendable
@dataclass(frozen=True, slots=True)
class RunFact:
    """A fact that all ranks must have alike: ``shown`` is what a message says of it, ``hash`` is that of the rest."""

    shown: str = ""
    hash: str = ""


_HELP: Final = {
    "software": "install the same versions on every host",
    "build": "build the plan once, and copy the folder to every host, or name one that all hosts share: {path}",
    "option": "start every rank with the same options",
    "torch": "make torch's settings on every rank the same, before `parc.load`",
    "data": "give every host the same files, or name a folder that all hosts share; `sha256sum` compares them",
}
"""The way out where facts of a subject differ, in the order in which subjects are named: what stands first may be the
cause of the rest. Files have the line of the plan, or the option, that names them as their subject."""
_MAY_LACK = frozenset({"data", "eval"})
"""The lines whose files a rank may lack: a loop may bring its own batches. Where they are read, they are asked for."""


@sendable
@dataclass(frozen=True)
class RankFacts:
    """The facts of what a rank runs. ``facts`` are compared, by subject and name. Where they differ, ``plan``, the
    lines of the plan, say best why; ``fault`` is that of the model's code on this rank."""

    facts: Mapping[str, Mapping[str, RunFact]]
    plan: tuple[str, ...] = ()
    path: str = ""
    host: str = field(default_factory=socket.gethostname)
    fault: RunError | None = None

    def digest(self) -> int:
        """Return a hash of all that is compared, a signed integer of 64 bits."""
        rows = [[subject, name, fact.shown, fact.hash] for subject, names in sorted(self.facts.items())
                for name, fact in sorted(names.items())]  # fmt: skip
        text = json.dumps([rows, self.fault and self.fault.message])
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), signed=True)


def hold_one_build(together: Lockstep, build: Build, device: torch.device, options: Mapping[str, object]) -> None:
    """Check that all ranks run one build, with the same code, software, options and files. One exchange.

    Raises:
        RunError: on every rank: one differs; the ranks and what differs are named.
    """
    if together.world == 1:
        return

    def make() -> tuple[RankFacts, list[int]]:
        mine = rank_facts(build, device, options)
        return mine, [mine.digest()]

    mine, rows = together.exchanged("parc.load", make)
    groups: dict[int, list[int]] = {}
    for rank, (digest,) in enumerate(rows):
        groups.setdefault(digest, []).append(rank)
    if len(groups) > 1:
        every = of_every_role(mine, [str(digest) for (digest,) in rows])
        if error := difference(list(zip(groups.values(), every, strict=True))):
            raise error


# ---- the facts of a rank


def rank_facts(build: Build, device: torch.device, options: Mapping[str, object]) -> RankFacts:
    """Return what a rank runs of a build on a device. ``options`` are those of the run that all ranks must have
    alike."""
    facts = {
        "software": _software(build),
        "build": _build_facts(build),
        "option": {
            "the device": RunFact(device.type),
            **{f"`{name}`": _option(value) for name, value in options.items()},
        },
        "torch": _torch_settings(),
        **dict(_files(build)),
    }
    lines = (line.split() for line in build.texts.get("plan.parc", "").splitlines())
    plan = tuple(" ".join(words) for words in lines if words and words[0] not in _PROMISES)
    fault = None
    try:
        check_source_of(build)
    except RunError as error:
        fault = error
    return RankFacts(facts, plan, str(build.path), fault=fault)


def build_hash(build: Build) -> str:
    """Return a hash of what a run computes: equal for all copies of a build, and for a plan that is built again."""
    return f"{RankFacts({'build': _build_facts(build)}).digest() % 2**64:016x}"


def hash_at_any_sizes(build: Build) -> str:
    """Return the hash of a build at its largest sizes: the same for all sizes at which it runs."""
    if build.template is not None:
        build = build.at({name: values.high for name, values in build.template.ranges.items()})
    return build_hash(build)


def _build_facts(build: Build) -> dict[str, RunFact]:
    return {**_code(build), **_manifest_facts(build.manifest), **_programs(build)}


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _option(value: object) -> RunFact:
    if value is None or isinstance(value, bool):
        return RunFact("given" if value else "not given")
    return RunFact(str(value))


def _software(build: Build) -> dict[str, RunFact]:
    """Return the versions of parc, of torch, and of installed packages that have the model and the loss."""
    parc = import_module(__name__.partition(".")[0])
    software = {"parc": RunFact(parc.__version__, _source_of_parc()), "torch": RunFact(torch.__version__)}
    for place in (target.partition(":")[0] for target in sources_of(build.manifest)):
        package = place.partition(".")[0]
        if not place.endswith(".py") and package not in software:
            with suppress(importlib.metadata.PackageNotFoundError):  # a module of the plan's folder
                software[package] = RunFact(importlib.metadata.version(package))
    return software


@cache
def _source_of_parc() -> str:
    """Return the hash of the files of parc that run on a rank: two checkouts may have one version."""
    digest = blake2b(digest_size=16)
    for layer in _LAYERS:
        root = Path(__file__).parents[2] / layer
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{layer}/{file.relative_to(root)}".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _code(build: Build) -> dict[str, RunFact]:
    return {f"{_CODE} `{name}`": RunFact(hash=code) for name, code in build.manifest["model_source"].items()}


def _manifest_facts(manifest: Mapping[str, Any]) -> dict[str, RunFact]:
    """Return the facts of a manifest, those of a table each by its own key."""
    facts = {}
    for key, value in manifest.items():
        if key in _UNCOMPARED:
            continue
        for inner, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            if key == "data" and inner in _NAMED_HERE and manifest.get("said") == PREDICTED:
                continue
            text = json.dumps(unlined(each), sort_keys=True)
            name = f"`{key}.{inner}`" if inner else f"`{key}`"
            facts[f"{name} of manifest.json"] = (
                RunFact(text) if len(text) <= _SHOWN else RunFact(hash=_hash(text.encode()))
            )
    return facts


def _programs(build: Build) -> dict[str, RunFact]:
    return {f"`{name}`": RunFact(hash=_hash(LINES.sub("", text).encode()))
            for name, text in build.texts.items() if name not in _PROSE and not is_of_first_check(name)}  # fmt: skip


def _torch_settings() -> dict[str, RunFact]:
    """Return the settings of torch that change numbers: of products, of draws, or of what the model's code makes."""
    settings = {f"`torch.{name}`": str(attrgetter(name)(torch)) for name in _SETTINGS}
    settings |= {f"`torch.{name}()`": str(getattr(torch, name)()) for name in _SETTING_CALLS}
    settings |= {f"the variable `{name}`": os.environ.get(name, "not set") for name in _OVERRIDES}
    return {name: RunFact(value) for name, value in settings.items()}


def _files(build: Build) -> Iterator[tuple[str, dict[str, RunFact]]]:
    """Yield the files that a run reads, by the line or the option that names them. A line of data without files here
    has none: a loop may bring its own batches."""
    manifest = build.manifest
    lines = [(manifest.get("said", "data"), manifest["data"]), ("eval", manifest.get("evaluation", {}).get("data"))]
    for verb, line in lines:
        if line is not None:
            of_line = f"`{verb}`" if verb.startswith("--") else f"the `{verb}` line"
            yield (
                verb,
                {f"`{name}` of {of_line}": _file_fact(path) for name, path in _paths(line, build.folder)}
                | {f"{_CODE} `{name}`": RunFact(hash=code) for name, code in _data_code(line, build.folder).items()},
            )
    if (line := manifest["init"]) is not None:
        folder = build.folder / line["folder"]
        weights = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
        yield "init from", {f"`{path.name}` of `init from`": _file_fact(path) for path in weights}


def _paths(line: Mapping[str, Any], folder: Path) -> list[tuple[str, Path]]:
    try:
        return [*data_files(line, folder).items()]
    except DataError:
        return []


def _data_code(line: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the hashes of the code that makes samples."""
    try:
        return {
            name: code
            for name, (code, _) in file_hashes([line["callable"]] if line["callable"] else [], folder).items()
        }
    except CallableError:
        return {}


def _file_fact(path: Path) -> RunFact:
    """Return the size of a file, and the hash of its head and its tail."""
    try:
        with open(check_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_PROBE)
            file.seek(max(len(head), size - _PROBE))
            return RunFact(f"{size:,} bytes long", _hash(head + file.read(_PROBE)))
    except OSError as error:
        return RunFact(f"unreadable ({(error.strerror or str(error)).lower()})")


# ---- what differs, in words


def difference(groups: Sequence[tuple[Sequence[int], RankFacts]]) -> RunError | None:
    """Return the error of ranks that do not run the same; ``groups`` are ranks with equal facts, by their first rank.
    Those that differ from the largest group are named. None where all that differs changes no number."""
    usual, facts = max(groups, key=lambda group: len(group[0]))
    rest = ranks_text(usual) if len(groups) > 2 or len(usual) == 1 else "the other ranks"
    sentences = [
        (subject, sentence, ranks_text(ranks), other)
        for ranks, other in groups if other is not facts
        for subject, sentence in _differences(ranks, rest, other, facts)
    ]  # fmt: skip
    if not sentences:
        return _fault_of(groups)
    sentences.sort(key=lambda row: [*_HELP].index(_row_of_help(row[0])))
    (subject, message, odd, other), *more = sentences
    notes = [sentence for _, sentence, _, _ in more[:_MOST_NOTES]]
    notes += [f"{len(more) - _MOST_NOTES} more differ"] * (len(more) > _MOST_NOTES)
    if other.host != facts.host:
        notes.append(f"host of {odd}: {other.host}; of {rest}: {facts.host}")
    help_ = _HELP[_row_of_help(subject)].format(path=f"`{facts.path}`")
    return RunError(RANKS_DIFFER, message, help_, notes)


def _row_of_help(subject: str) -> str:
    return subject if subject in _HELP else "data"


def _fault_of(groups: Sequence[tuple[Sequence[int], RankFacts]]) -> RunError | None:
    """Return the fault of the model's code that some ranks have, and some have not."""
    fault = next((facts.fault for _, facts in groups if facts.fault is not None), None)
    ranks = sorted(rank for held, facts in groups if facts.fault is not None for rank in held)
    if fault is None or len(ranks) == sum(len(held) for held, _ in groups):
        return None
    return RunError(fault.code, fault.message, fault.help, (*fault.notes, f"so it is on {ranks_text(ranks)}"))


def _differences(ranks: Sequence[int], rest: str, other: RankFacts, facts: RankFacts) -> Iterator[tuple[str, str]]:
    """Yield each thing that differs, as its subject and a sentence."""
    odd = ranks_text(ranks)
    for subject in dict.fromkeys([*facts.facts, *other.facts]):
        mine, theirs = other.facts.get(subject, {}), facts.facts.get(subject, {})
        names = [name for name in dict.fromkeys([*theirs, *mine]) if mine.get(name) != theirs.get(name)]
        if not names or (subject in _MAY_LACK and not (mine and theirs)):
            continue
        if subject == "build":
            yield subject, f"{odd} run{'s' * (len(ranks) == 1)} another build than {rest}"
            lines = [*_plan_lines(odd, rest, other.plan, facts.plan)]
            yield from ((subject, line) for line in lines)
            code = [name for name in names if name.startswith(_CODE)]
            names = code or ([] if lines else names)  # programs and manifest follow from plan and code
        for name in names:
            yield subject, _sentence(name, odd, rest, mine.get(name), theirs.get(name))


def _sentence(name: str, odd: str, rest: str, mine: RunFact | None, theirs: RunFact | None) -> str:
    """Return the sentence on a fact that ``odd`` ranks do not have as the ``rest`` do; None is one that is missing."""
    if mine is None or theirs is None:
        return f"{name} is missing on {odd if mine is None else rest}, and not on {rest if mine is None else odd}"
    if mine.shown != theirs.shown:
        return (
            f"{name} is {mine.shown or 'something longer'} on {odd}, and {theirs.shown or 'something longer'} on {rest}"
        )
    return f"{name} on {odd} is another one than on {rest}" + f", though both are {mine.shown}" * bool(mine.shown)


def _plan_lines(odd: str, rest: str, mine: Sequence[str], theirs: Sequence[str]) -> Iterator[str]:
    """Yield sentences on lines that only one of two plans has, side by side where their first words agree."""
    only_mine = [line for line in mine if line not in theirs]
    only_theirs = [line for line in theirs if line not in mine]
    for line in only_mine:
        verb = line.partition(" ")[0]
        if like := next((other for other in only_theirs if other.partition(" ")[0] == verb), None):
            only_theirs.remove(like)
            yield f"the plan has `{line}` on {odd}, and `{like}` on {rest}"
        else:
            yield f"the plan has `{line}` on {odd}, and no such line on {rest}"
    for line in only_theirs:
        yield f"the plan has no `{line}` on {odd}, and has it on {rest}"
