"""Mutators of builds: texts changed line by line as a faulty pass would, and alike in all programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple


class Row(NamedTuple):
    """A line of a function: its place, results, operator, arguments, types, and the words behind them."""

    file: str
    at: int
    results: str
    op: str
    args: tuple[str, ...]
    types: str
    origin: str

    def text(self) -> str:
        """Return the line."""
        return f"    {self.results} = {self.op}({', '.join(self.args)})  # {self.types} | {self.origin}"


Texts = Mapping[str, str]
Edits = dict[str, str]
"""The files that a mutant changes, whole."""


class Mutant(NamedTuple):
    """A change of texts: its kind, what it did, and what makes the files as it leaves them."""

    kind: str
    what: str
    edits: Callable[[], Edits]


_LINE = re.compile(r"    (\w+(?:, \w+)*) = ([\w.]+)\((.*)\)  # (.+?) \| (.*)")
_PARAMETER = re.compile(r'    (\w+): "([^"]+)",(?:  # (.+))?')
_RETURN = re.compile(r'        "([^"]+)": (\w+),')


def split(text: str) -> tuple[str, ...]:
    """Return the arguments of a line; those in brackets are one."""
    parts, depth, last = [], 0, ""
    for word in text.split(", ") if text else []:
        last = f"{last}, {word}" if depth else word
        depth += sum(word.count(mark) for mark in "[(") - sum(word.count(mark) for mark in "])")
        if not depth:
            parts.append(last)
    return tuple(parts)


def rows_of(texts: Texts) -> list[Row]:
    """Return the lines of all programs but the model's."""
    return [
        Row(file, at, match[1], match[2], split(match[3]), match[4], match[5])
        for file in programs(texts)
        for at, line in enumerate(texts[file].split("\n"))
        if (match := _LINE.fullmatch(line))
    ]


def programs(texts: Texts) -> list[str]:
    """Return the files of the step's programs."""
    return [name for name in texts if "programs/" in name and not name.endswith("model.py")]


def known_before(texts: Texts, row: Row) -> dict[str, str]:
    """Return the names that a line may read, with their types."""
    lines = texts[row.file].split("\n")
    names: dict[str, str] = {}
    for line in lines[: row.at]:
        if line.startswith("def "):
            names = {}
        elif match := _PARAMETER.fullmatch(line):
            names[match[1]] = match[2]
        elif match := _LINE.fullmatch(line):
            names.update(zip(match[1].split(", "), match[4].split("; "), strict=True))
    return names


def with_line(texts: Texts, file: str, at: int, *lines: str) -> Edits:
    """Return a file with other lines in the place of one."""
    rows = texts[file].split("\n")
    return {file: "\n".join([*rows[:at], *lines, *rows[at + 1 :]])}


# ---- mutators of lines: each yields what it did, and the lines in the place of one

Changed = Iterator[tuple[str, list[str]]]
LikeRows = (
    ("aten.silu.default", "aten.gelu.default", "aten.relu.default", "aten.tanh.default", "aten.sigmoid.default"),
    ("aten.silu_backward.default", "aten.gelu_backward.default"),
    ("aten.tanh_backward.default", "aten.sigmoid_backward.default", "aten.mul.Tensor"),
    ("aten.sin.default", "aten.cos.default", "aten.exp.default", "aten.neg.default"),
    ("aten.sqrt.default", "aten.rsqrt.default", "aten.square.default", "aten.log.default", "aten.reciprocal.default"),
    ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.maximum.default"),
    ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default"),
    ("aten.sum.default", "aten.mean.default"),
    ("aten.ge.Scalar", "aten.gt.Scalar", "aten.le.Scalar", "aten.lt.Scalar", "aten.eq.Scalar", "aten.ne.Scalar"),
    ("aten.ge.Tensor", "aten.gt.Tensor", "aten.le.Tensor", "aten.lt.Tensor", "aten.eq.Tensor", "aten.ne.Tensor"),
    ("aten.alias.default", "aten.detach.default", "aten.clone.default", "parc.wait", "aten.neg.default"),
    ("parc.reduce_scatter", "parc.shard", "parc.all_gather"),
    ("parc.pack.default", "parc.spread.default"),
    ("aten.triu.default", "aten.tril.default"),
    ("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"),
    ("parc.lookup_backward.default", "aten.embedding_dense_backward.default"),
)  # fmt: skip
"""Operators that may stand for each other."""


def _operand(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    for at, name in enumerate(row.args):
        others = [other for other, type_ in names.items() if other != name and type_ == names.get(name)]
        for other in draw.sample(others, min(3, len(others))):
            args = (*row.args[:at], other, *row.args[at + 1 :])
            yield f"{name} -> {other}", [row._replace(args=args).text()]


def _swap(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    at = [place for place, name in enumerate(row.args) if name in names]
    for one in at:
        for other in at:
            if one < other:
                args = list(row.args)
                args[one], args[other] = args[other], args[one]
                yield f"{args[one]} for {args[other]}", [row._replace(args=tuple(args)).text()]


def _operator(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    for like in LikeRows:
        for other in like if row.op in like else ():
            if other != row.op:
                yield f"{other} for {row.op}", [row._replace(op=other).text()]


_NUMBER = re.compile(r"(?<![\w.'])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.'/])|\b(?:True|False|None)\b|'[\w.,~]*'")


def other_numbers(text: str, names: Sequence[str] = ("dp", "tp", "cp", "ep", "pp", "")) -> Iterator[str]:
    """Yield other arguments than a number, a flag or a word of an argument."""
    if text in ("True", "False"):
        yield str(text == "False")
    elif text == "None":
        yield from ("0", "1", "True")
    elif text.startswith("'"):
        inner = text[1:-1]
        yield from (f"'{name}'" for name in names if name != inner)
        yield from {"none": ("'tanh'",), "tanh": ("'none'",)}.get(inner, ())
    else:
        number = float(text)
        whole = "." not in text and "e" not in text
        yield from (str(int(number) + more) for more in (1, -1, 2) if whole)
        yield from (repr(number * by) for by in (10, 0.5, 1.0000001) if not whole)
        yield from ("0" if whole else "0.0",) if number else ()
        yield str(-int(number)) if whole else repr(-number)


def _number(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    for at, arg in enumerate(row.args):
        for match in _NUMBER.finditer(arg):
            for other in other_numbers(match[0]):
                new = arg[: match.start()] + other + arg[match.end() :]
                args = (*row.args[:at], new, *row.args[at + 1 :])
                yield f"{arg} -> {new}", [row._replace(args=args).text()]


def _drop(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    results = row.results.split(", ")
    reads = [name for arg in row.args for name in re.findall(r"\b[a-z_]\w*\b", arg) if name in names]
    for name in dict.fromkeys(reads):
        for result, type_ in zip(results, row.types.split("; "), strict=True):
            if names[name].split("]")[0] == type_.split("]")[0] or row.op.startswith("parc."):
                line = f"    {result} = aten.alias.default({name})  # {type_} | {row.origin}"
                if len(results) == 1:
                    yield f"{name} in its place", [line]


def _again(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    if ", " in row.results:
        return
    once = row._replace(results="once")
    for at, name in enumerate(row.args):
        if names.get(name, "").split("]")[0] == row.types.split("]")[0]:
            again = row._replace(args=(*row.args[:at], "once", *row.args[at + 1 :]))
            yield f"twice on {name}", [once.text(), again.text()]


def _factor(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    if ", " not in row.results and re.match(r"b?f\d+\[", row.types):
        kept = row._replace(results="once")
        for by in ("1.0005", "0.0"):
            more = row._replace(op="aten.mul.Scalar", args=("once", by))
            yield f"times {by}", [kept.text(), more.text()]


def _results(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    results = row.results.split(", ")
    for at in range(len(results) - 1):
        results[at], results[at + 1] = results[at + 1], results[at]
        yield "results in another order", [row._replace(results=", ".join(results)).text()]


_SPLIT = re.compile(r"(\d+)((?:/~?\w+)+)")


def other_types(text: str, axes: Sequence[str], draw: Random) -> Iterator[str]:
    """Yield other types of a line: other axes, parts, marks and numbers."""
    for match in _SPLIT.finditer(text):
        before, behind = text[: match.start()], text[match.end() :]
        size, names = int(match[1]), match[2].split("/")[1:]
        if len(names) > 1:
            yield f"{before}{size}/{'/'.join(reversed(names))}{behind}"
        yield f"{before}{size}/{'/'.join(names[1:])}{behind}".replace("/,", ",").replace("/]", "]")
        for axis in axes:
            yield f"{before}{size}/{'/'.join([axis, *names[1:]])}{behind}"
        yield f"{before}{size}/{'/'.join([f'~{names[0]}' if names[0][0] != '~' else names[0][1:], *names[1:]])}{behind}"
        if size % 2 == 0:
            yield f"{before}(2 {size // 2}{match[2]}){behind}"
    for match in re.finditer(r"\((\d+) (\d+)(/[\w/~]+)\)", text):
        yield text.replace(match[0], f"{int(match[1]) * int(match[2])}{match[3]}")
    for match in re.finditer(r" \+\w+", text):
        yield text.replace(match[0], "")
    yield from (f"{text} +{axis}" for axis in axes if f"/{axis}" not in text and f"+{axis}" not in text)
    for one, other in (("f32", "f64"), ("f32", "i64"), ("i64", "f32"), ("bool", "f32"), ("i64", "bool")):
        if text.startswith(one):
            yield text.replace(one, other)


def _type(row: Row, names: Mapping[str, str], draw: Random) -> Changed:
    types = row.types.split("; ")
    for at, type_ in enumerate(types):
        for other in other_types(type_, AXES, draw):
            changed = "; ".join([*types[:at], other, *types[at + 1 :]])
            yield f"{type_} -> {other}", [row._replace(types=changed).text()]


AXES = ("dp", "tp", "cp", "ep", "pp")
LINES: Mapping[str, Callable[[Row, Mapping[str, str], Random], Changed]] = {
    "operand": _operand, "swapped operands": _swap, "operator": _operator, "number": _number, "dropped": _drop,
    "doubled": _again, "factor": _factor, "results": _results, "type": _type,
}  # fmt: skip
"""Mutators of a line, by their names."""

# ---- mutators of whole texts


def in_lines(texts: Texts, draw: Random) -> Iterator[Mutant]:
    """Yield mutants of single lines, each mutator at its turn, in any order."""
    rows = rows_of(texts)
    for row in draw.sample(rows, min(len(rows), 2000)):
        names = known_before(texts, row)
        for kind, mutate in LINES.items():
            changes = list(mutate(row, names, draw))
            for what, lines in draw.sample(changes, min(3, len(changes))):
                place = f"{row.file}:{row.at + 1} {row.results[:40]} = {row.op}"
                yield Mutant(kind, f"{place}: {what}", partial(with_line, texts, row.file, row.at, *lines))


def in_pairs(texts: Texts, draw: Random) -> Iterator[Mutant]:
    """Yield mutants that exchange two lines' bindings, results or callees: of parameters, of what is returned, and of
    layers that one function is called for."""
    for file in programs(texts):
        rows = texts[file].split("\n")
        for pattern, field_ in ((_PARAMETER, "binding"), (_RETURN, "returned")):
            places = [at for at, row in enumerate(rows) if (m := pattern.fullmatch(row)) and m[m.lastindex or 1]]
            for _ in range(min(40, len(places) ** 2)):
                one, other = draw.sample(places, 2) if len(places) > 1 else (0, 0)
                a, b = pattern.fullmatch(rows[one]), pattern.fullmatch(rows[other])
                if a is None or b is None or one == other:
                    continue
                if field_ == "binding":
                    if a[3] is None or b[3] is None or a[2] != b[2]:
                        continue
                    first, second = (f'    {x[1]}: "{x[2]}",  # {y[3]}' for x, y in ((a, b), (b, a)))
                else:
                    first, second = f'        "{a[1]}": {b[2]},', f'        "{b[1]}": {a[2]},'
                changed = list(rows)
                changed[one], changed[other] = first, second
                what = f"{file}: {a[0].strip()} and {b[0].strip()}"
                yield Mutant(f"exchanged {field_}", what, partial(_joined, file, changed))
                if field_ == "returned":
                    changed = list(rows)
                    changed[one] = first
                    yield Mutant("returned again", f"{file}: {a[0].strip()} -> {b[2]}", partial(_joined, file, changed))
        lines = [at for at, row in enumerate(rows) if _LINE.fullmatch(row)]
        for at in draw.sample(lines, min(12, len(lines))):
            if at + 1 in lines:
                changed = list(rows)
                changed[at], changed[at + 1] = changed[at + 1], changed[at]
                yield Mutant("lines exchanged", f"{file}:{at + 1}", partial(_joined, file, changed))
            what = f"{file}:{at + 1} {rows[at][:60]}"
            yield Mutant("line dropped", what, partial(_joined, file, [*rows[:at], *rows[at + 1 :]]))


def _joined(file: str, rows: Sequence[str]) -> Edits:
    return {file: "\n".join(rows)}


def alike(texts: Texts, draw: Random) -> Iterator[Mutant]:
    """Yield mutants that change all programs alike: an operator, a number, an axis, a type or a name everywhere."""
    rows = rows_of(texts)
    words = {(row.op, arg) for row in rows for arg in row.args if _NUMBER.fullmatch(arg)}
    for op, arg in sorted(words):
        for other in other_numbers(arg):
            edits = partial(
                _everywhere,
                texts,
                partial(_reads, arg=arg, op=op),
                partial(_with_argument, arg=arg, other=other),
            )
            yield Mutant("number, alike", f"{op}: {arg} -> {other}", edits)
    values = {arg for _, arg in words if "." in arg}
    for arg in sorted(values):
        for other in other_numbers(arg):
            edits = partial(
                _everywhere,
                texts,
                partial(_reads, arg=arg),
                partial(_with_argument, arg=arg, other=other),
            )
            yield Mutant("number, alike", f"{arg} -> {other}", edits)
    for like in LikeRows:
        for one in like:
            for other in like:
                pair = {one: other, _backward(one): _backward(other)}
                if one != other and any(row.op == one for row in rows):
                    edits = partial(
                        _everywhere, texts, partial(_is_one_of, ops=pair), partial(_with_operator, ops=pair)
                    )
                    yield Mutant("operator, alike", f"{one} -> {other}", edits)
    for op in sorted(
        {row.op for row in rows if row.op in ("parc.all_reduce", "parc.reduce_scatter", "parc.all_gather")}
    ):
        for axis in AXES:
            edits = partial(
                _everywhere,
                texts,
                partial(_reads, arg=f"'{axis}'", op=op),
                lambda row: row._replace(op="aten.alias.default", args=row.args[:1]),
            )
            yield Mutant("collective dropped, alike", f"{op} over {axis}", edits)
    bindings = sorted({m[1] for f in programs(texts) for m in re.finditer(r"# (parameter [\w.]+)", texts[f])})
    saved = sorted(
        {m[1] for f in programs(texts) for m in re.finditer(r'"((?:saved|sent|gradient) [\w.]+)"', texts[f])}
    )
    for names in (bindings, saved):
        for _ in range(min(40, len(names) ** 2)):
            if len(names) < 2:
                continue
            one, other = draw.sample(names, 2)
            yield Mutant("names exchanged, alike", f"{one} and {other}", partial(_renamed, texts, one, other))
    types = sorted({t for row in rows for t in row.types.split("; ")})
    for type_ in draw.sample(types, min(30, len(types))):
        for other in draw.sample(many := list(other_types(type_, AXES, draw)), min(2, len(many))):
            yield Mutant("type, alike", f"{type_} -> {other}", partial(_retyped_all, texts, type_, other))


def _reads(row: Row, arg: str, op: str = "") -> bool:
    return arg in row.args and op in ("", row.op)


def _with_argument(row: Row, arg: str, other: str) -> Row:
    return row._replace(args=tuple(other if each == arg else each for each in row.args))


def _is_one_of(row: Row, ops: Mapping[str, str]) -> bool:
    return row.op in ops


def _with_operator(row: Row, ops: Mapping[str, str]) -> Row:
    return row._replace(op=ops[row.op])


def _backward(op: str) -> str:
    """Return the operator of gradients: ``aten.silu_backward.default``."""
    space, name, overload = (*op.split("."), "default")[:3]
    return f"{space}.{name}_backward.{overload}"


def _retyped_all(texts: Texts, type_: str, other: str) -> Edits:
    pattern = re.compile(rf'(?<=[ "]){re.escape(type_)}(?=[";]| \|)')
    return {file: pattern.sub(lambda _: other, texts[file]) for file in programs(texts)}


def _renamed(texts: Texts, one: str, other: str) -> Edits:
    """Exchange two names that values have between programs, in some of the texts' places."""
    short, long = one.partition(" ")[2], other.partition(" ")[2]
    kinds = {"saved": ("saved",), "sent": ("sent", "received"), "gradient": ("gradient",)}.get(
        one.split()[0], ("parameter",)
    )
    edits = {}
    for file in programs(texts):
        if kinds == ("saved",) and ".F." not in file:
            continue
        text = texts[file]
        for kind in kinds:
            text = re.sub(
                rf'({kind}) ({re.escape(short)}|{re.escape(long)})(?=["\n])',
                lambda m: f"{m[1]} {long if m[2] == short else short}",
                text,
            )
        if text != texts[file]:
            edits[file] = text
    return edits


def _everywhere(texts: Texts, which: Callable[[Row], bool], change: Callable[[Row], Row]) -> Edits:
    edits: Edits = {}
    for row in rows_of(texts):
        if which(row):
            edits |= with_line({**texts, **edits}, row.file, row.at, change(row).text())
    return edits


def in_manifest(texts: Texts, draw: Random) -> Iterator[Mutant]:
    """Yield mutants of how parameters are stored: in the manifest alone, and in the programs too."""
    facts = json.loads(texts["manifest.json"])
    for name, type_ in facts["parameters"].items():
        many = [*other_types(type_, AXES, draw), *sorted({*facts["parameters"].values()} - {type_})]
        many += [
            re.sub(r"(\d+)", rf"\1/{axis}", type_.replace("f32", "f@"), count=1).replace("f@", "f32") for axis in AXES
        ]
        for other in draw.sample(many, min(3, len(many))):
            changed = {**facts, "parameters": {**facts["parameters"], name: other}}
            what, edits = f"{name}: {type_} -> {other}", {"manifest.json": json.dumps(changed)}
            yield Mutant("stored type", what, partial(dict, edits))
            old, new = f'"{type_}",  # parameter {name}\n', f'"{other}",  # parameter {name}\n'
            yield Mutant("stored type, alike", what, partial(_stored, texts, edits, old, new))
    for count in (1, 2, 3, 4):
        if count != facts["microbatches"]:
            changed = {**facts, "microbatches": count}
            yield Mutant("microbatches", f"{count}", partial(dict, {"manifest.json": json.dumps(changed)}))


def _stored(texts: Texts, edits: Edits, old: str, new: str) -> Edits:
    return {**edits, **{file: texts[file].replace(old, new) for file in programs(texts)}}


def in_schedule(texts: Texts, draw: Random) -> Iterator[Mutant]:
    """Yield mutants of the schedule: actions dropped, doubled, exchanged, moved, of another number or role."""
    for file in (name for name in texts if name.endswith("schedule.txt")):
        lines = texts[file].rstrip("\n").split("\n")
        for _ in range(60):
            at = draw.randrange(len(lines))
            role, _, rest = lines[at].partition(": ")
            actions = rest.split(" ")
            one, other = draw.randrange(len(actions)), draw.randrange(len(actions))
            kind = draw.choice(["drop", "double", "exchange", "move", "number"])
            word = actions[one]
            if kind == "drop":
                del actions[one]
            elif kind == "double":
                actions.insert(other, word)
            elif kind == "exchange":
                actions[one], actions[other] = actions[other], actions[one]
            elif kind == "move":
                actions.insert(other, actions.pop(one))
            else:
                actions[one] = re.sub(r"\d+", lambda m: str(int(m[0]) ^ 1), word, count=draw.randrange(1, 3))
            if actions != rest.split(" "):
                changed = [*lines[:at], f"{role}: {' '.join(actions)}", *lines[at + 1 :]]
                what = f"{role} {word} {one} {other}"
                yield Mutant(f"schedule, {kind}", what, partial(_joined, file, [*changed, ""]))


SOURCES = (in_lines, in_pairs, alike, in_manifest, in_schedule)


def lying(texts: Texts, axes: Sequence[str]) -> Edits:
    """Return programs in which every line's type says that the value is partial over every axis: what types refuse is
    accepted, so that meanings alone tell."""

    def lie(match: re.Match[str]) -> str:
        types = []
        for type_ in match[1].split("; "):
            more = [a for a in axes if not re.search(rf"[/+~]{a}\b", type_)] if type_ != "-" else []
            _, _, packed = type_.partition("] ")
            marks = " ".join(f"+{axis}" for axis in more)
            types.append(f"{type_} {marks}".rstrip() if not packed or "of" not in packed else type_)
        return f"  # {'; '.join(types)} | "

    return {file: re.sub(r"  # (.+?) \| ", lie, texts[file]) for file in programs(texts)}
