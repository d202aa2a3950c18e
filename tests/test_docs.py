"""The documentation: every command, plan and piece of Python of its pages, their links, and the check of the site."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks_of, command_faults, plan_faults, python_faults, text_of
from website.__main__ import main as make_site
from website.api import api_page
from website.built import faults
from website.pictures import pictures
from website.staging import FENCED, LINK, stage


def test_every_plan_of_a_page_is_one() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "parc"]
    wrong = {block.place: found for block in blocks if (found := plan_faults(block))}
    assert len(blocks) > 5 and not wrong, "\n".join(f"{place}\n{found}" for place, found in wrong.items())


def test_python_of_every_page_names_what_parc_has() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
    wrong = [found for block in blocks for found in python_faults(block)]
    assert len(blocks) > 3 and not wrong, "\n".join(wrong)


def test_every_command_of_a_page_is_one() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "sh"]
    commands = [(block.place, words) for block in blocks for words in block.commands()]
    wrong = [f"{place}: {found}" for place, words in commands if (found := command_faults(words))]
    assert len(blocks) > 5 and not wrong, "\n".join(wrong)


def test_every_script_of_a_page_is_one() -> None:
    scripts = [block for page in PAGES for block in blocks_of(page) if block.language == "sh" and block.title]
    assert scripts
    for block in scripts:
        read = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert not read.returncode, f"{block.place}: {read.stderr}"


def test_a_wrong_command_is_found() -> None:
    assert "unrecognized arguments: --stepps" in command_faults(["parc", "run", "build/gpt", "--stepps", "5"])
    assert command_faults(["make", "dmeo"]) and command_faults(["rm", "-rf", "build"])


def test_the_page_of_the_api_is_current() -> None:
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == api_page(), "run `python -m website.api > docs/api.md`"


def test_the_pictures_are_current() -> None:
    folder = ROOT / "docs/pictures"
    there = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert there == pictures(), "run `python -m website.pictures`"


def places(page: Path) -> set[str]:
    """Return the names of a page's headings, as links to them are written."""
    outside = "".join(FENCED.split(page.read_text(encoding="utf-8"))[::2])
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_what_a_page_links_to_is_there() -> None:
    wrong = []
    for page in [*PAGES, "docs/errors.md"]:
        for _, name, place in LINK.findall("".join(FENCED.split(text_of(page))[::2])):
            target = (ROOT / page).parent / name
            if not target.exists():
                wrong.append(f"{page}: {name}")
            elif place[1:-1] and place[1:-1] not in places(target):
                wrong.append(f"{page}: {name}{place[:-1]}")
    assert not wrong, wrong


_ROOMS = "compiler|grammar|passes|runtime|parc|tests|benchmarks"
FILE = re.compile(rf"`((?:[\w.*-]+/)*[\w*-]+\.(?:py|lark)|(?:{_ROOMS})/[\w./-]*)`")


def test_every_file_and_folder_that_a_page_names_is_there() -> None:
    """A name may also be a file of the reader's, which a block of the page shows, or of a build."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".lark")]
    wrong, named = [], 0
    for page in sorted({*PAGES, *(f"docs/decisions/{path.name}" for path in (ROOT / "docs/decisions").iterdir())}):
        text = text_of(page)
        for name in FILE.findall(text):
            named += 1
            theirs = name.startswith("programs/") or re.search(rf'[ "/]{re.escape(name)}(?!`)', text)  # of a build
            there = (ROOT / name).exists() or any(path.match(name) for path in files)
            wrong += [] if there or theirs else [f"{page}: {name}"]
    assert named > 150 and not wrong, wrong


HEADLESS = re.compile(r"(?:What|Of|Who|Whose|Whoever|Whether)\b|.*\bmade again\b")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, without headings, tables and code. A label in bold is a heading too."""
    prose = re.sub(r"^(?:#|\||<).*$|\*\*.*?\*\*", "\n", "".join(FENCED.split(text)[::2]), flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", prose, flags=re.MULTILINE)
    return [sentence for part in parts for sentence in re.split(r"(?<=[.?!:])\s+", " ".join(part.split()))]


def test_sentences_begin_with_their_subject() -> None:
    """A reader of "Of calls that fail, the one that came furthest" has to find out first what the sentence is about."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {page: sentences(page.read_text(encoding="utf-8")) for page in pages}
    headless = [(page.name, text) for page in pages for text in found[page] if HEADLESS.match(text) and text[-1] != "?"]
    assert sum(map(len, found.values())) > 2000 and not headless, headless


def test_the_site_takes_every_page_and_has_each_in_its_menu(tmp_path: Path) -> None:
    """Decisions have a page that lists them."""
    staged = {str(page) for page in stage(ROOT, tmp_path)}
    menu = set(re.findall(r'= "([^"]+\.md)"', (ROOT / "website/zensical.toml").read_text(encoding="utf-8")))
    assert menu <= staged
    assert {page for page in staged - menu if not page.startswith(("decisions/", "benchmarks/"))} == set()


GOOD = """<html><head><link rel="stylesheet" href="a.css"><link rel="canonical" href="https://parc.example/"></head>
<body><h1 id="top">A</h1><a href="b.html#there">b</a><a href="#top">up</a><a href="https://pytorch.org">torch</a>
<img src="data:image/png;base64,"></body></html>"""
BAD = {
    '<script src="https://cdn.example/x.js"></script>': "loads https://cdn.example/x.js",
    '<link rel="stylesheet" href="//fonts.example/css">': "loads //fonts.example/css",
    '<p style="background: url(https://img.example/x.png)">': "loads https://img.example/x.png",
    '<a href="c.html">': "`c.html` leads nowhere",
    '<a href="b.html#here">': "`b.html#here` leads nowhere",
    '<img src="d.svg">': "`d.svg` leads nowhere",
}


@pytest.mark.parametrize("fault", BAD)
def test_the_check_of_the_site_finds_loads_from_elsewhere_and_broken_links(fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("p { color: red }")
    (tmp_path / "b.html").write_text('<h2 id="there">B</h2>')
    (tmp_path / "a.html").write_text(GOOD)
    assert not list(faults(tmp_path))
    (tmp_path / "e.html").write_text(GOOD.replace("</body>", fault))
    assert list(faults(tmp_path)) == [f"e.html: {BAD[fault]}"]


def test_the_check_of_the_site_reads_style_sheets(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url(https://fonts.example/a.woff2) }")
    assert list(faults(tmp_path)) == ["a.css: loads https://fonts.example/a.woff2"]


def test_a_site_is_written_over_no_folder_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "mine.txt"):
        assert make_site(out) == 1 and "stays as it is" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"
