"""The names of a captured model, and the search for the names that a plan's line means."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from ...grammar.codes import NO_SITE, NO_WEIGHT, NOTHING_MATCHED
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.syntax import Word
from ..layout.mesh import Shape
from ..layout.stretches import Outer
from ..plan.layouts import SplitWeights
from ..plan.plan import Plan
from ..program.stacked import EACH
from .pattern import ANY_DEPTH, Pattern

# ---- values inside a model that a plan's lines can place, as ``out(blocks.3)`` and ``in(blocks.3)``.


class DimOfInput(NamedTuple):
    """A dim of an input, found in a value: the entries of the value's ``dim``, seen as ``(outer, rest)``, that ``rest``
    begins with."""

    input: str
    input_dim: int
    dim: int
    outer: Outer


@dataclass(frozen=True, slots=True)
class InnerValue:
    """A value that crosses the border of a module, by the one name that stands for all names it has."""

    name: str
    shape: Shape
    sources: tuple[DimOfInput, ...] = ()
    """The dims of inputs that its dims come from, by the operators' rules."""

    def sizes(self, plan: Plan) -> Iterator[tuple[str, int, Outer]]:
        """Yield the plan's sizes that are in the value: name, dim and outer parts, each once."""
        dims = {line.name: line.dims for line in plan.inputs}
        places = ((dims[at.input][at.input_dim], at.dim, at.outer) for at in self.sources if at.input in dims)
        yield from dict.fromkeys((name, dim, outer) for name, dim, outer in places if isinstance(name, str))

    def dims(self, plan: Plan, batch: str) -> tuple[str | int, ...]:
        """Return the name of each dim that is a size of the plan, and the number of entries of any other one."""
        names: list[str | int] = list(self.shape)
        for name, dim, _ in self.sizes(plan):
            size = plan.sizes[name].high // (plan.microbatches if name == batch else 1)
            if self.shape[dim] == size:  # and not a product of several sizes
                names[dim] = name
        return tuple(names)


@dataclass(frozen=True)
class InnerValues:
    """The values that cross borders of a model's modules, by ``out(MODULE)`` and ``in(MODULE)``; several ones are in
    the order in which the model makes them."""

    named: Mapping[str, tuple[InnerValue, ...]] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, InnerValue]:
        """Each value by its one name."""
        return {site.name: site for sites in self.named.values() for site in sites}


# ---- layers that adapters wrap, as those of the ``peft`` library

_WRAPPED_WEIGHT = r"(base_layer|modules_to_save\.[^.]+)\.weight"


def layer_weights(module: str, style: str, parameters: Collection[str]) -> list[tuple[str, str | None]]:
    """Return the weights of a linear layer or a table that a line of a style splits, each with its bias.

    Of a wrapped layer they are its own weight, and the factors of adapters that have the dim which is split: the second
    where outputs are split, the first where inputs are.

    >>> layer_weights("up", "column", ["up.base_layer.weight", "up.lora_A.a.weight", "up.lora_B.a.weight"])
    [('up.base_layer.weight', None), ('up.lora_B.a.weight', None)]
    """
    if f"{module}.weight" in parameters:
        weights = [f"{module}.weight"]
    else:
        factor = r"lora_A\.[^.]+\.weight" if style == "row" else r"lora_B\.[^.]+\.weight"
        split = re.compile(rf"{re.escape(module)}\.({_WRAPPED_WEIGHT}|{factor})")
        weights = list(filter(split.fullmatch, parameters))
    biases = (f"{weight.removesuffix('.weight')}.bias" for weight in weights)
    return [(weight, bias if bias in parameters else None) for weight, bias in zip(weights, biases, strict=True)]


# ---- the names of a model, and those that a line means

OPTIONAL = "a `?` at the end lets a pattern match nothing"


@dataclass(frozen=True, slots=True)
class WeightUse:
    """The use of a parameter as a linear weight or a lookup table: the dim of its outputs (in a table: of its
    vocabulary), and the dim that is contracted. Of weights stacked over experts both are that of experts."""

    kind: Literal["linear", "lookup", "experts", "other"]
    out_dim: int | None = None
    in_dim: int | None = None


@dataclass(frozen=True, slots=True)
class ModelOperator:
    """An operator that a module's code calls: the words by which a line may mean it, and whether it is cheap."""

    words: frozenset[str]
    cheap: bool


@dataclass(frozen=True, slots=True)
class PlanNames:
    """The names of a captured model; shapes are global. ``tied`` maps other names of a parameter to its name."""

    parameters: dict[str, Shape]
    inputs: dict[str, Shape] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    uses: dict[str, WeightUse] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    pieces: Callable[[str, int], tuple[int, ...]] = lambda name, dim: ()
    """A function of a parameter's name and dim. It returns the sizes of the pieces into which the model cuts the dim
    that this one becomes, if it does."""
    operators: Mapping[str, Collection[ModelOperator]] = field(default_factory=dict)
    """The operators of the captured graph in each module."""
    smaller: bool = False
    """True where the model is a twin, which may lack layers of the plan's own model: patterns may then match
    nothing."""
    sites: Callable[[], InnerValues] = InnerValues
    """A function that returns the values inside the model, by their names."""

    def canonical(self, name: str) -> str:
        """The one name of a parameter or input."""
        return self.tied.get(name, name)

    def shape(self, name: str) -> Shape:
        """Return the global shape of a parameter, by any of its names, of an input, or of a value inside the model."""
        name = self.canonical(name)
        if (site := self.site(name)) is not None:
            return site.shape
        return self.parameters[name] if name in self.parameters else self.inputs[name]

    def site(self, name: str) -> InnerValue | None:
        """Return the value inside the model that has this name, if one has."""
        return self.sites().by_name.get(name) if name.endswith(")") else None

    def use(self, name: str) -> WeightUse:
        """Return the use of the parameter that has this name."""
        return self.uses.get(name) or self.uses.get(self.canonical(name)) or WeightUse("other")

    @property
    def ordered_modules(self) -> list[str]:
        """The modules by the segments of their names, numbers by value."""
        return sorted(self.modules, key=_natural)

    @property
    def all_parameters(self) -> tuple[str, ...]:
        """Every name of every parameter."""
        return tuple(dict.fromkeys((*self.parameters, *self.tied)))


Weight = tuple[str, str | None]
"""A weight that a line splits, by the name under which the line found it, with its bias."""


def find_each(
    words: Iterable[Word], names: PlanNames, find: Callable[[Word, PlanNames], tuple[str, ...] | Diagnostic]
) -> tuple[list[str], list[Diagnostic]]:
    """Return the names that words mean, each once, and the errors of words that mean none."""
    results = [find(word, names) for word in words]
    meant = dict.fromkeys(name for result in results if not isinstance(result, Diagnostic) for name in result)
    return list(meant), [result for result in results if isinstance(result, Diagnostic)]


def find_values(word: Word, names: PlanNames) -> tuple[str, ...] | Diagnostic:
    """Return the parameters and inputs that a word means, each under its one name."""
    if word.text.endswith(")"):
        return _find_sites(word, names)
    pattern, known = Pattern(word.text), (*names.all_parameters, *names.inputs)
    matches, modules = pattern.of(known), pattern.of(sorted(names.modules))
    inside = [name for name in known if modules and name.startswith(f"{modules[0]}.")]
    help_ = f"it is a module: name its parameters, as {listed(inside[:3], 'or')}" if inside else ""
    fault = _name_fault(word, "parameter or input", matches, known, names, help_)
    return fault or tuple(dict.fromkeys(map(names.canonical, matches)))


_SITE_NUMBER = re.compile(r",(\d+)$")


def _find_sites(word: Word, names: PlanNames) -> tuple[str, ...] | Diagnostic:
    """Return the values that ``out(PATTERN)``, ``in(PATTERN)`` or ``out(PATTERN,1)`` means, each under its one name."""
    kind, _, inside = word.text[:-1].partition("(")
    text, number = (inside[: -len(at[0])], at[1]) if (at := _SITE_NUMBER.search(inside)) else (inside, None)
    known = names.ordered_modules
    modules = Pattern(text).of(known)
    if (fault := _name_fault(Word(text, word.span), "module", modules, known, names)) is not None:
        return fault
    meant: dict[str, None] = {}
    for module in modules:
        sites = names.sites().named.get(f"{kind}({module})", ())
        chosen = sites if number is None else sites[int(number) : int(number) + 1]
        if len(chosen) == 1:
            meant[chosen[0].name] = None
        elif not names.smaller:
            return _no_site(word, kind, module, sites)
    return tuple(meant)


def _no_site(word: Word, kind: str, module: str, sites: Sequence[InnerValue]) -> Diagnostic:
    """Return the error of a module that reads or gives no value, or several of which none is chosen."""
    verb = "gives to" if kind == "out" else "reads of"
    message = f"`{module}` {verb} other modules no value that depends on weights"
    help_ = f"name a module around it, as `{kind}({module.rpartition('.')[0] or 'blocks.0'})`, or behind it"
    if sites:
        shapes = listed([str(list(site.shape)) for site in sites])
        message = f"`{module}` {verb} other modules {len(sites)} value{'s' * (len(sites) > 1)}: {shapes}"
        help_ = f"choose one by its number from 0: `{kind}({module}, {len(sites) - 1})`"
    return Diagnostic(NO_SITE, message, Label(word.span), help=help_)


def find_parameters(word: Word, names: PlanNames) -> tuple[str, ...] | Diagnostic:
    """Return the parameters that a word means, each under its one name: the named ones, or all inside named modules."""
    pattern = Pattern(word.text)
    modules, named = pattern.of(names.ordered_modules), pattern.of(names.all_parameters)
    inside = [name for name in names.all_parameters if any(name.startswith(f"{module}.") for module in modules)]
    matches = tuple(dict.fromkeys(map(names.canonical, [*named, *inside])))
    if modules and not matches and not pattern.optional and not names.smaller:
        help_ = "name modules that have parameters, or parameters themselves"
        message = f"the module `{modules[0]}` has no parameters"
        return Diagnostic(NOTHING_MATCHED, message, Label(word.span), help=help_)
    known = (*names.ordered_modules, *names.all_parameters)
    return _name_fault(word, "module or parameter", (*modules, *named), known, names) or matches


def is_within(module: str, outer: str) -> bool:
    """Return whether a module is another one, or lies inside it; the whole model's name is empty."""
    return not outer or module == outer or module.startswith(f"{outer}.")


def find_modules(word: Word, names: PlanNames) -> tuple[str, ...] | Diagnostic:
    """Return the outermost modules that a word means; `**` is the whole model, whose name is empty."""
    if word.text == ANY_DEPTH:
        return ("",)
    known = names.ordered_modules
    matches = Pattern(word.text).of(known)
    inside = next((name for name in names.tied if name.startswith(f"{word.text}.")), "")
    first = names.tied.get(inside, "").removesuffix(inside.removeprefix(word.text))
    help_ = f"it is another name of `{first}`: write that name" if first in names.modules else ""
    fault = _name_fault(word, "module", matches, known, names, help_)
    return fault or tuple(name for name in matches if not any(name.startswith(f"{outer}.") for outer in matches))


def find_weights(line: SplitWeights, word: Word, names: PlanNames) -> tuple[tuple[Weight, ...], tuple[Diagnostic, ...]]:
    """Return the weights that a word of a `column`, `row` or `vocab` line means, and the errors."""
    pattern = Pattern(word.text)
    modules, named = pattern.of(names.ordered_modules), pattern.of(names.all_parameters)
    if line.style == "experts":
        return _find_stacks(word, names, modules)
    parameters = dict.fromkeys(names.all_parameters)
    weights = [weight for module in modules for weight in layer_weights(module, line.style, parameters)]
    weights = weights or [(name, None) for name in named]
    known = (*names.ordered_modules, *names.all_parameters)
    if (fault := _name_fault(word, "module or parameter", (*modules, *named), known, names)) is not None:
        return (), (fault,)
    if not weights and modules:
        inside = [name for name in names.all_parameters if name.startswith(f"{modules[0]}.")]
        children = [name.removesuffix(".weight") for name in inside if name.endswith(".weight")]
        help_ = f"name modules inside it, as {listed(children[:3], 'or')}" if children else "name a linear layer"
        message = f"the module `{modules[0]}` has no weight"
        return (), (Diagnostic(NO_WEIGHT, message, Label(word.span), help=help_),)
    errors = tuple(error for name, _ in weights if (error := _check_style(line, word, name, names)) is not None)
    return (() if errors else tuple(weights)), errors


def _find_stacks(
    word: Word, names: PlanNames, modules: Sequence[str]
) -> tuple[tuple[Weight, ...], tuple[Diagnostic, ...]]:
    """Return the weights that are stacked over experts in modules that a word means, and the errors."""
    inside = [name for name in names.all_parameters if any(name.startswith(f"{module}.") for module in modules)]
    stacks = tuple((name, None) for name in inside if names.use(name).kind == "experts")
    if stacks or names.smaller:
        return stacks, ()
    if not modules:
        return (), (_nothing(word, "module", Pattern(word.text), names.ordered_modules, ""),)
    held = f"its parameters are {listed(inside[:3], 'and')}" if inside else "it has no parameters"
    others = (name for name, use in names.uses.items() if use.kind == "experts")
    known = sorted({name.rpartition(".")[0].partition(f".{EACH}")[0] for name in others}, key=_natural)
    help_ = f"name the modules of experts, as {listed(known[:2], 'or')}" if known else (
        "parc knows no module of this model with experts: it knows those that share transformers' interface "
        "`experts(hidden, index, weights)`, Llama 4's, loops over a list with the tokens of each expert, and"
        " layers that `parc.register_experts` names"
    )  # fmt: skip
    message = f"`{modules[0]}` holds no weights that are stacked over experts: {held}"
    return (), (Diagnostic(NO_WEIGHT, message, Label(word.span), help=help_),)


def split_dim(style: str, use: WeightUse) -> int | None:
    """Return the dim of a weight that a style splits, or None if this use of a weight has no such dim."""
    if style == "experts":
        return 0
    if style == "vocab":
        return use.out_dim if use.kind in ("lookup", "linear") else None
    if use.kind != "linear":
        return None
    return use.in_dim if style == "row" else use.out_dim


def _check_style(line: SplitWeights, word: Word, name: str, names: PlanNames) -> Diagnostic | None:
    use = names.use(name)
    if split_dim(line.style, use) is not None:
        return None
    entries = ", ".join("_" for _ in names.shape(name))
    help_ = f"place it by its dims: `shard {name} [{entries}]` with `/{line.axis.text}` on one of them"
    message = f"`{name}` is not the weight of a linear layer"
    if use.kind == "lookup":
        message = f"`{name}` is an embedding table, not the weight of a linear layer"
        help_ = f"use `vocab {word.text} over {line.axis.text}`"
    elif line.style == "vocab":
        message = f"`{name}` is neither an embedding table nor the weight of a linear layer"
    return Diagnostic(NO_WEIGHT, message, Label(word.span), help=help_)


def _name_fault(
    word: Word, what: str, matches: Sequence[str], known: Iterable[str], names: PlanNames, help_: str = ""
) -> Diagnostic | None:
    """Return the error of a word that matches nothing, or of which one alternative does; None where that may be."""
    pattern = Pattern(word.text)
    if pattern.optional or names.smaller:
        return None
    if not matches:
        return _nothing(word, what, pattern, known, help_)
    for alternative, alone, instead in pattern.idle(matches):
        error = _nothing(word, what, Pattern(alone), known, f"did you mean `{instead}`?" if instead else "")
        message = f"`{alternative or alone}` in `{word.text}` matches no {what}"
        return replace(error, message=message, notes=(OPTIONAL,))
    return None


def _nothing(word: Word, what: str, pattern: Pattern, known: Iterable[str], help_: str) -> Diagnostic:
    if not help_:
        nearest = pattern.nearest(known)
        help_ = (
            f"did you mean {listed(nearest, 'or')}?"
            if nearest
            else "names are those of the model's own modules: `parc show PLAN --list` lists them"
        )
    notes = (OPTIONAL,) if pattern.wild else ()
    message = f"`{word.text}` matches no {what}" if pattern.wild else f"no {what} is called `{word.text}`"
    return Diagnostic(NOTHING_MATCHED, message, Label(word.span), help=help_, notes=notes)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key by segments, numbers by value."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]
