"""Ranks that do not run the same: one of them has another build, code, torch, option or file, and all are told so
before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

import parc
from parc.compiler.build.directory import FORMAT, MANIFEST
from parc.grammar.diagnostics import render
from parc.runtime.data.sources import data_files
from parc.runtime.ranks import gather
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.lockstep import Lockstep
from parc.runtime.session.evaluation import evaluation_of, with_samples
from parc.runtime.session.one_build import RankFacts, RunFact, difference, hold_one_build, rank_facts
from parc.runtime.state.opening import open_build
from tests.runtime import tiny
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, FLAT, TENSOR, build

PLAN = FLAT.replace('"*.py"', '"text/*.txt"')
CPU = torch.device("cpu")


def made(folder: Path, plan: str = PLAN, placements: str = DATA, text: str = "A") -> Path:
    """Build a plan in a folder that has its data."""
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.txt").write_text(text * 100)
    return build(folder, placements, plan)


@contextmanager
def model_with(folder: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Enter a block in which builds are of the example's model after a change of its code."""
    folder.mkdir()
    code = (tiny.EXAMPLES / "gpt.py").read_text()
    (folder / "gpt.py").write_text(change(code))
    assert change(code) != code
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "EXAMPLES", folder)
        yield


def facts(path: Path, **options: object) -> RankFacts:
    """Return what a rank of a run of a build has."""
    return replace(rank_facts(open_build(path), CPU, options), path="build", host="host0")


def said(other: RankFacts, usual: RankFacts, ranks: tuple[int, ...] = (1,), world: int = 2) -> list[str]:
    """Return the message, the notes and the help of ranks that are unlike the rest; nothing where they may go on."""
    rest = [rank for rank in range(world) if rank not in ranks]
    groups = sorted([(rest, usual), (list(ranks), other)], key=lambda group: group[0])
    error = difference(groups)
    return [] if error is None else [error.message, *error.notes, error.help]


BUILT_ONCE = "build the plan once, and copy the folder to every host, or name one that all hosts share: `build`"
OTHER = "rank 1 runs another build than rank 0"
LINE = "optimizer adamw lr 1e-2 eps 1e-5 weight_decay {} clip {}"
PLANS: dict[str, tuple[str, str, str]] = {
    "seed": (PLAN.replace("seed      3", "seed 4"), DATA, "the plan has `seed 4` on rank 1, and `seed 3` on rank 0"),
    "clip": (
        PLAN.replace("clip 1.0", "clip 2.0"), DATA,
        f"the plan has `{LINE.format('0.1', '2.0')}` on rank 1, and `{LINE.format('0.1', '1.0')}` on rank 0",
    ),
    "weight decay": (
        PLAN.replace("weight_decay 0.1", "weight_decay 0.2"), DATA,
        f"the plan has `{LINE.format('0.2', '1.0')}` on rank 1, and `{LINE.format('0.1', '1.0')}` on rank 0",
    ),
    "precision": (
        PLAN, DATA + "precision bf16\n", "the plan has `precision bf16` on rank 1, and no such line on rank 0"
    ),
    "dropout": (
        PLAN.replace("dropout=0.1", "dropout=0.2"), DATA,
        'the plan has `model "./gpt.py:GPT" (layers=1, width=16, heads=2, vocab=256, length=8, dropout=0.2)` on rank 1,'
        ' and `model "./gpt.py:GPT" (layers=1, width=16, heads=2, vocab=256, length=8, dropout=0.1)` on rank 0',
    ),
    "mesh": (PLAN, "mesh tp=2\n", "the plan has `mesh tp=2` on rank 1, and `mesh dp=2` on rank 0"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build of most ranks."""
    return made(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", PLANS)
def test_another_plan_is_named_by_its_lines(name: str, base: Path, tmp_path: Path) -> None:
    plan, placements, line = PLANS[name]
    message, *notes, help_ = said(facts(made(tmp_path / "other", plan, placements)), facts(base))
    assert (message, notes[0], help_) == (OTHER, line, BUILT_ONCE)
    assert len(notes) == 1 + (name == "mesh"), "no fact that follows from the line"


def test_builds_that_compute_the_same_are_one(base: Path, tmp_path: Path) -> None:
    usual = facts(base)
    assert facts(made(tmp_path / "again")).digest() == usual.digest()
    assert facts(made(tmp_path / "promise", placements="budget memory 1GiB\n" + DATA)).digest() == usual.digest()
    with model_with(tmp_path / "commented", lambda code: f"# a comment\n\n{code}"):
        moved = facts(made(tmp_path / "moved"))
    assert moved.digest() == usual.digest() and said(moved, usual) == []


def test_another_code_of_the_model_is_named_by_its_file(base: Path, tmp_path: Path) -> None:
    with model_with(tmp_path / "changed", lambda code: code.replace("gelu", "relu")):
        other = facts(made(tmp_path / "other"))
    assert said(other, facts(base)) == [
        OTHER,
        "the code of `gpt.py` on rank 1 is another one than on rank 0",
        BUILT_ONCE,
    ]


def test_code_that_one_host_changed_after_the_build_is_told_to_all(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base.parent, tmp_path / "copy")
    code = tmp_path / "copy" / "gpt.py"
    code.write_text(code.read_text().replace("gelu", "relu"))
    other = facts(tmp_path / "copy" / base.name)
    message, note, help_ = said(other, facts(base), (2, 3), 4)
    assert message == "`gpt.py` of the model's code changed since the build"
    assert note == "so it is on ranks 2 and 3" and help_.startswith("build the plan again")
    assert said(replace(other, fault=None), facts(base)) == [], "the build is the same"


def test_programs_that_another_parc_made_are_named(base: Path) -> None:
    usual = facts(base)
    programs = dict(usual.facts["build"])
    programs["`programs/stage0.F.py`"] = RunFact(hash="another")
    assert said(replace(usual, facts={**usual.facts, "build": programs}), usual, (5, 6, 7), 8) == [
        "ranks 5 to 7 run another build than the other ranks",
        "`programs/stage0.F.py` on ranks 5 to 7 is another one than on the other ranks",
        BUILT_ONCE,
    ]


def test_versions_options_and_settings_are_named_with_their_values(base: Path) -> None:
    usual = facts(base, **{"--steps": 10, "--compile": False, "--save-every": None})
    other = facts(base, **{"--steps": 5, "--compile": True, "--save-every": 2})
    assert said(other, usual) == [
        "`--steps` is 5 on rank 1, and 10 on rank 0",
        "`--compile` is given on rank 1, and not given on rank 0",
        "`--save-every` is 2 on rank 1, and not given on rank 0",
        "start every rank with the same options",
    ]
    software = {"torch": RunFact("2.11.0"), "parc": replace(usual.facts["software"]["parc"], hash="another checkout")}
    mixed = replace(other, facts={**other.facts, "software": software}, host="host1")
    message, *notes, help_ = said(mixed, usual)
    version = usual.facts["software"]["parc"].shown
    assert message == f"parc on rank 1 is another one than on rank 0, though both are {version}"
    assert notes[0] == f"torch is 2.11.0 on rank 1, and {torch.__version__} on rank 0"
    assert notes[-1] == "host of rank 1: host1; of rank 0: host0"
    assert help_ == "install the same versions on every host"
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        narrow = facts(base)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert said(narrow, facts(base)) == [
        f"`torch.backends.cuda.matmul.fp32_precision` is tf32 on rank 1, and {before} on rank 0",
        "make torch's settings on every rank the same, before `parc.load`",
    ]


def test_files_are_compared_by_size_head_and_tail(base: Path, tmp_path: Path) -> None:
    usual, same_files = facts(base), "give every host the same files, or name a folder that all hosts share"
    other = facts(made(tmp_path / "other", text="B"))
    both = "`a.txt` of the `data` line on rank 1 is another one than on rank 0, though both are 100 bytes long"
    assert said(other, usual) == [both, f"{same_files}; `sha256sum` compares them"]
    longer = facts(made(tmp_path / "longer", text="AA"))
    assert (
        said(longer, usual)[0] == "`a.txt` of the `data` line is 200 bytes long on rank 1, and 100 bytes long on rank 0"
    )
    (tmp_path / "longer" / "text" / "b.txt").write_text("more")
    more = facts(tmp_path / "longer" / base.name)
    assert said(more, longer)[0] == "`b.txt` of the `data` line is missing on rank 0, and not on rank 1"
    shutil.rmtree(tmp_path / "longer" / "text")
    lacking = facts(tmp_path / "longer" / base.name)
    assert said(lacking, usual) == [], "a loop may bring its own batches"


def test_only_the_head_and_the_tail_of_a_large_file_are_read(base: Path, tmp_path: Path) -> None:
    usual = facts(base)
    text = bytearray(b"A" * (200 << 10))
    prints = []
    for place in (None, 100 << 10, 0, len(text) - 1):
        changed = bytearray(text)
        if place is not None:
            changed[place] = ord("B")
        (base.parent / "text" / "a.txt").write_bytes(changed)
        prints.append(facts(base).digest())
    (base.parent / "text" / "a.txt").write_text("A" * 100)
    assert prints[0] == prints[1] and len({*prints}) == 3
    assert facts(base).digest() == usual.digest()


def test_the_files_of_a_line_have_names_that_do_not_depend_on_the_host(tmp_path: Path) -> None:
    def names(form: str, pattern: str, folder: Path) -> list[str]:
        return [*data_files({"form": form, "names": [pattern]}, folder)]

    for host in (tmp_path / "host0", tmp_path / "host1"):
        for file in ("data/x.bin", "data/x.idx", "data/inner/y.bin", "saved/data-0.arrow", "saved/cache-1.arrow"):
            (host / file).parent.mkdir(parents=True, exist_ok=True)
            (host / file).write_text("1")
        assert names("tokens", "data/*.bin", host) == ["x.bin", "x.idx"]
        assert names("bytes", f"{host}/data/**/*.bin", host / "elsewhere") == ["inner/y.bin", "x.bin"]
        assert names("bytes", "data/x.bin", host) == ["x.bin"]
        assert names("folder", "saved", host) == ["data-0.arrow"], "the cache is each host's own"
        assert names("folder", "data/x.bin", host) == ["x.bin"]
        assert "os.py" in names("bytes", "{stdlib}/*.py", host)
        assert names("synthetic", "x", host) == []


def test_files_of_several_patterns_that_have_one_name_are_all_compared(tmp_path: Path) -> None:
    for file in ("a/x.txt", "b/x.txt", "b/y.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    line = {"form": "bytes", "names": ["a/*.txt", "b/*.txt", "b/x.*"]}
    files = {name: path.read_text() for name, path in data_files(line, tmp_path).items()}
    assert files == {"x.txt": "a/x.txt", "x.txt (2)": "b/x.txt", "y.txt": "b/y.txt", "x.txt (3)": "b/x.txt"}


def test_weights_and_predicted_samples_are_compared(tmp_path: Path) -> None:
    start = made(tmp_path / "start")
    weights = parc.reference(start).module.state_dict()
    (tmp_path / "weights").mkdir()
    save_file({name: value.clone() for name, value in weights.items() if name != "head.weight"},
              tmp_path / "weights" / "model.safetensors")  # fmt: skip
    path = made(tmp_path / "build", PLAN + 'init from "../weights"\neval\n')
    usual = facts(path)
    file = tmp_path / "weights" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    message = said(facts(path), usual)[0]
    size = f"{file.stat().st_size:,} bytes long"
    assert (
        message == f"`model.safetensors` of `init from` on rank 1 is another one than on rank 0, though both are {size}"
    )
    file.unlink()
    assert said(facts(path), usual)[0] == "`model.safetensors` of `init from` is missing on rank 1, and not on rank 0"
    line: dict[str, object] = {"form": "bytes", "names": [""], "callable": None, "arguments": {}}

    def predicted(folder: str) -> RankFacts:
        asked = {**line, "names": [str(tmp_path / folder / "*.txt")]}
        return replace(rank_facts(with_samples(evaluation_of(open_build(path)), asked), CPU, {}), host="host0")

    for folder, text in (("here", "A"), ("there", "A"), ("other", "B")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    assert predicted("here").digest() == predicted("there").digest(), "hosts have files in places of their own"
    assert said(predicted("other"), predicted("here"))[0].startswith("`a.txt` of `--predict` on rank 1 is another one")


def test_several_groups_are_compared_with_the_largest() -> None:
    groups = [([0], RunFact("1")), ([1, 2, 3], RunFact("2")), ([4], RunFact("3"))]
    error = difference([(ranks, RankFacts({"option": {"`--steps`": fact}}, host="")) for ranks, fact in groups])
    assert error is not None
    assert render(error.diagnostic()) == (
        "error[P0417]: `--steps` is 1 on rank 0, and 2 on ranks 1 to 3\n"
        " = note: `--steps` is 3 on rank 4, and 2 on ranks 1 to 3\n"
        "help: start every rank with the same options"
    )
    many = {f"`--{number}`": RunFact("1") for number in range(9)}
    rows = [RankFacts({"option": many}, host=""), RankFacts({"option": dict.fromkeys(many, RunFact("2"))}, host="")]
    error = difference([([0], rows[0]), ([1], rows[1])])
    assert error is not None and error.notes[-1] == "2 more differ" and len(error.notes) == 7


# ---- real ranks


def loaded(first: str, *others: str) -> list[str]:
    """Return what one of two ranks is told where rank 1 loads each other build in turn, and the first step's loss of
    builds that are alike."""
    rank, heard = torch.distributed.get_rank(), []
    with patch("parc.runtime.ranks.lockstep.exchange", wraps=gather.exchange) as exchange:
        hold_one_build(Lockstep.joined(CPU), open_build(first), CPU, {})
    assert exchange.call_count == 1
    for other in others:
        try:
            with parc.load(other if rank else first) as session:
                heard.append(f"{session.step().loss:.4f}")
        except RunError as error:
            heard.append(str(error).replace(str(Path(first).parent.parent), ""))
    try:
        parc.load(first, compile=bool(rank))
    except RunError as error:
        heard.append(str(error))
    return heard


def test_ranks_of_a_loop_agree_before_anything_is_made(base: Path, tmp_path: Path) -> None:
    again, mesh = made(tmp_path / "again"), made(tmp_path / "mesh", placements=TENSOR)
    seed, old = made(tmp_path / "seed", PLANS["seed"][0]), shutil.copytree(again, tmp_path / "again" / "old")
    manifest = json.loads((old / MANIFEST).read_text())
    (old / MANIFEST).write_text(json.dumps({**manifest, "format": FORMAT - 1}))
    told = run_ranks(loaded, 2, *map(str, (base, again, seed, mesh, old)))
    assert told[0] == told[1]
    alike, seeds, meshes, format_, compiled = told[0]
    assert float(alike) > 0
    assert seeds.splitlines()[0].startswith(f"[P0417] {OTHER}; build the plan once")
    assert seeds.splitlines()[1:] == [f"  {PLANS['seed'][2]}"]
    assert meshes.startswith(f"[P0417] {OTHER}")
    assert (
        f"old` is a build of format {FORMAT - 1}, and this parc reads format {FORMAT}; build the plan again" in format_
    )
    assert format_.splitlines()[-1] == "  so it is on rank 1"
    assert (
        compiled
        == "[P0417] `compile` is given on rank 1, and not given on rank 0; start every rank with the same options"
    )
