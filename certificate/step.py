"""The meaning of a step: what a build's programs hand to each other, and what all of them compute beside the model.

Values are known between programs by their bindings: ``saved x`` is what F of the same stage returned, ``received x``
what the other stage sent, ``gradient w`` the sum over microbatches of what B returned. The number of a microbatch is a
letter like an axis of the mesh, so the sum over all of them is a sum over this letter.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from . import FORMAT
from .build import EVALUATION, Build, Texts, choices, read_build, read_manifest, read_texts, sizes_text
from .equal import describe
from .letters import DivideAxis
from .meaning import Table, Value
from .nodes import Form
from .own import read_own
from .padding import padded_whole, real_whole
from .programs import Reader, Returned, Settle, bound_to, kind_of, place_of, received
from .schedule import AFTER, BEFORE, WORK, check_schedule, stages_of
from .suspects import Suspects
from .tensors import MICROBATCH
from .text import Function, Malformed, Parameter, Program, Refused, Type, read_type

_STORED = ("parameter", "frozen", "buffer", "constant")
"""The kinds of the model's own tensors, which no program of a step makes."""
_BEYOND = ("STEP",)
"""The actions that come after all that is proved."""
_KNOWN = (*BEFORE, *WORK, *AFTER)
"""The actions that a step has by itself. Others may be added to it that return metrics alone."""
_LOSS_SCALE = ("loss_scale", "good_steps", "skipped_steps")
"""The state of steps by which a loss is scaled that would round to zero."""
_OF_BATCH = ("input", "rng")
"""The kinds that every microbatch has its own of."""

FORMS = Form(), Form(in_pieces=False), Form(in_digits=True, named=False)
"""The normal forms in which a build may be its model."""
ATTEMPTS = (FORMS[0], 10_000), (FORMS[1], 15_000), (FORMS[0], 30_000), (FORMS[1], 30_000), (FORMS[2], 10_000)
"""The forms that are tried one after the other, each with the most steps that it may take."""


class Unlike(Refused):
    """The error of a value that is not what the model says."""


@dataclass
class Proof:
    """The result of a proof: a sentence for each role."""

    lines: list[str] = field(default_factory=list)
    nodes: int = 0


def certify(folder: Path) -> Proof:
    """Prove that the build in a folder computes what its model says, and its evaluation too.

    Raises:
        Refused: it does not, or the checker has no rule for a part of it, or reads builds of another format.
    """
    texts = read_texts(folder)
    manifest = read_manifest(texts)
    if (have := manifest.get("format")) != FORMAT:
        raise Refused(f"the build is of format {have}, and this checker reads format {FORMAT}: build the plan again")
    return certify_texts(texts, manifest)


def certify_texts(texts: Texts, manifest: Mapping[str, Any]) -> Proof:
    """Prove the same of the texts of a build by their places in its folder. Where sizes have ranges, it is proved at
    the largest, the smallest, and some between.

    Raises:
        Refused: they do not compute what the model says, or the checker has no rule for a part of them.
    """
    collected = gc.isenabled()
    gc.disable()  # a table only grows, and a collection would visit all of it
    proof = Proof()
    try:
        for sizes in choices(manifest):
            at = f", at {sizes_text(sizes)}" if sizes else ""
            for part in ("", EVALUATION) if any(place.startswith(EVALUATION) for place in texts) else ("",):
                try:
                    of_part = _certify(read_build(texts, manifest, part, sizes))
                except Refused as error:
                    raise Refused(f"{error}{at}") if at else error from None
                proof.nodes += of_part.nodes
                proof.lines += [f"{part.replace('/', ', ')}{line}{at}" for line in of_part.lines]
        return proof
    except RecursionError:
        raise Refused("its values are made of each other too deeply") from None
    finally:
        if collected:
            gc.enable()


def _certify(build: Build) -> Proof:
    """Prove one part of a build, at some sizes, in one of the normal forms. If one of them takes many steps, the
    others are tried before all of them are done."""
    refused: dict[Form, Exception] = {}
    done = set[Form]()
    for form, most in ATTEMPTS:
        if form in done:
            continue
        step = Step(build)
        step.table.form, step.table.most = form, most
        try:
            step.read_model()
            return step.run_to_end()
        except (Refused, RecursionError) as error:
            if isinstance(error, Malformed):
                raise
            refused[form] = error
            done.update(() if step.table.spent else (form,))
    refusal = refused[FORMS[0]]
    if isinstance(refusal, Unlike):
        step = Step(build)
        try:
            step.read_model()
            step.reader.suspects = Suspects(step.tensors, step.reader.of_model, step.reader.meant)
            step.run_to_end()
        except (Refused, RecursionError) as other:  # sums that are made to look at lines may be too much
            refusal = other if isinstance(other, Unlike) else refusal
    raise refusal from None


class Step:
    """The values of one step, by their bindings."""

    def __init__(self, build: Build) -> None:
        self.build = build
        count = build.manifest.get("microbatches")
        if not isinstance(count, int) or count < 1:
            raise Refused("manifest.json says no number of microbatches")
        self.microbatches = count
        self.mesh = next(iter(build.programs.values())).mesh
        for program in build.programs.values():
            if program.mesh != self.mesh:
                raise Refused(f"{program.file}: has another mesh than other programs")
        check_schedule(build.roles, self.microbatches, {role: build.kinds(role) for role in build.roles})
        overlaps = any(action.ahead for actions in build.roles.values() for action in actions)
        if overlaps and not build.manifest.get("optimizer", {}).get("previous"):
            raise Refused("schedule.txt: a step begins before the last update, and manifest.json says that it reads it")
        self.stages = stages_of(build.roles)
        roles = list(build.roles)
        self.axis = "" if len(roles) == 1 else roles[0].rstrip("0123456789")
        """The axis of roles, along which programs differ: none of them may speak of its ranks."""
        ranks = {axis: size for axis, size in self.mesh.sizes if axis != self.axis}
        self.table = Table({**ranks, MICROBATCH: self.microbatches})
        self.reader = Reader(self.table, self.mesh, read_own(build.manifest.get("operators", {})))
        self.tensors = self.reader.tensors
        try:
            stored = dict(build.manifest["parameters"])
            self.stored = {name: read_type(str(text), self.mesh) for name, text in stored.items()}
        except (LookupError, TypeError, ValueError) as error:
            raise Refused(f"manifest.json: {error}") from None
        padding = build.manifest.get("padding", {})
        try:
            self.padding = {name: [tuple(map(int, row)) for row in rows] for name, rows in padding.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise Refused(f"manifest.json: its padding is none: {error}") from None
        if partial := sorted(name for name, type_ in self.stored.items() if type_.partial):
            raise Refused(f"the manifest stores `{partial[0]}` as parts of a sum")

    # ---- the model

    def outside(self, parameter: Parameter) -> Value:
        """Return a rank's piece of what no program makes: weights, buffers, inputs, the state of steps.

        Raises:
            Refused: the model reads no such value, or in another shape, or it is stored otherwise.
        """
        kind, _, name = parameter.binding.partition(" ")
        if kind == "state":
            if name.startswith("residual"):
                return self.table.constant(0, parameter.type.local)
            return self.tensors.piece(self.table.leaf(parameter.binding, parameter.type.shape), parameter.type)
        shape = self.whole.get(parameter.binding)
        if shape is None:
            raise Refused(f"the model reads no `{parameter.binding}`")
        if parameter.type.partial:
            raise Refused(f"`{parameter.binding}` is read as parts of a sum")
        if name in self.padding and parameter.type.shape != shape:  # the model itself reads it without
            whole = padded_whole(self.tensors, self.tensors.leaf(parameter.binding, shape), self.padding[name])
        else:
            whole = None
        if parameter.type.shape != (shape if whole is None else whole.shape):
            raise Refused(
                f"`{parameter.binding}` is of {list(parameter.type.shape)}, and of {list(shape)} in the model"
            )
        if whole is not None:
            return self.tensors.cut(whole, parameter.type)
        each = self.microbatches if kind in _OF_BATCH else 1
        node = self.table.leaf(parameter.binding, (each, *shape) if each > 1 else shape)
        return self.tensors.piece(node, parameter.type, each)

    def read_model(self) -> None:
        """Give every result and gradient of the model a meaning, and its long sums names."""
        self.table.naming = self.table.form.named
        self._run_model()
        self.table.naming = False
        self.reader.of_model = len(self.table.nodes)

    def run_to_end(self) -> Proof:
        """Prove all programs, of a model that is read. The model's values know no ranks, so they stay where these are
        counted otherwise."""
        while True:
            # the first gradient that is not the model's, where others are looked at too
            self.unlike: tuple[Program, str, Value, Value] | None = None
            try:
                return self._run_programs()
            except DivideAxis as request:
                self.reader.divide(request.axis, request.sizes)

    def _run_model(self) -> None:
        functions = self.build.model.functions
        forward = functions.get("forward")
        if forward is None:
            raise Refused("model.py has no function `forward`")
        self.whole = {p.binding: p.type.shape for function in functions.values() for p in function.parameters}
        counts = self._model_function("count", {})
        scales = self._model_function("scale", {key: self.over_microbatches(value) for key, value in counts.items()})
        values = {p.name: scales[p.binding] if p.binding in scales else self.outside(p) for p in forward.parameters}
        calls = self.reader.forward(forward, values)
        self.expected = {key: values[name] for key, name in forward.returns}
        loads = {key: self.over_microbatches(value) for key, value in self.expected.items() if key.startswith("load ")}
        self.updates = self._model_function("update", loads)
        if "loss" in self.expected and "scale" not in scales:
            raise Refused("model.py does not say by what its loss is scaled")
        self.scales = scales
        trained = {
            p.name: p.binding.partition(" ")[2]
            for p in forward.parameters
            if p.binding.startswith("parameter ") and p.type.dtype.startswith(("f", "bf"))
        }
        self.gradients: dict[str, Value] = {}
        if self.build.trains:
            start = {dict(forward.returns)["loss"]: scales["scale"]}
            gradients = self.reader.gradients(calls, start, list(trained))
            self.gradients = {trained[name]: self.over_microbatches(value) for name, value in gradients.items()}

    def _model_function(self, name: str, known: Mapping[str, Value]) -> dict[str, Value]:
        """Return what a function of the model returns, which may read what another one does; nothing if it has none."""
        function = self.build.model.functions.get(name)
        if function is None:
            return {}
        values = {p.name: known[p.binding] if p.binding in known else self.outside(p) for p in function.parameters}
        self.reader.forward(function, values)
        return {key: values[name] for key, name in function.returns}

    def over_microbatches(self, value: Value) -> Value:
        """Return the sum of a value over all microbatches."""
        if self.microbatches == 1:
            return value
        total = self.reader.alike.value("microbatches", [value], lambda value: self.tensors.over(value, [MICROBATCH]))
        if self.reader.suspects is not None:
            self.reader.suspects.follow([value], total)
        return total

    # ---- the programs

    def run(
        self, program: Program, known: Mapping[str, Value], coming: Collection[str] = (), function: str = ""
    ) -> Returned:
        """Return what a program's main function returns, or another one."""
        main = program.functions[function] if function else program.main
        returned = self.reader.run(program, main, self.arguments(program, main, known), coming)
        self.kinds |= {place_of(program, key): kind for key, kind in returned.kinds.items()}
        if returned.coming and program.action != "UNSHARD" and not function:
            raise Malformed(f"{program.file}: returns `{min(returned.coming)}` while it is on its way")
        return returned

    def arguments(self, program: Program, function: Function, known: Mapping[str, Value]) -> list[Value]:
        """Return what a main function's parameters are bound to."""
        result = []
        self.read.add((program.role, program.action))
        sent, taken = (bound_to("received", names) for names in (known, (p.binding for p in function.parameters)))
        if taken != sent:
            raise Malformed(f"{program.file}: receives {taken}, where {sent} is sent: messages have no names")
        for parameter in function.parameters:
            kind, _, name = parameter.binding.partition(" ")
            try:
                if kind == "parameter" and self.stored.get(name) != parameter.type:
                    raise Malformed(f"`{name}` is not stored so")
                outside = kind in (*_STORED, *_OF_BATCH)
                if outside and self.types.setdefault(parameter.binding, parameter.type) != parameter.type:
                    raise Malformed(f"`{parameter.binding}` has another type in another program")
                if kind not in (*_STORED, *_OF_BATCH, "state") and parameter.binding not in known:
                    raise Malformed(f"nothing makes `{parameter.binding}` before it")
                number = kind_of(parameter.type)
                if self.kinds.get(place_of(program, parameter.binding), number) != number:
                    raise Malformed(f"`{parameter.binding}` is of another kind of numbers")
                result.append(known[parameter.binding] if parameter.binding in known else self.outside(parameter))
            except Refused as error:
                raise type(error)(f"{program.file}:{parameter.row}: {error}") from None
        return result

    def _run_programs(self) -> Proof:
        """Follow all programs of a step, and compare what leaves it with the model."""
        parameters = [p for function in self.build.model.functions.values() for p in function.parameters]
        self.kinds = {p.binding: kind_of(p.type) for p in parameters}
        self.types: dict[str, Type] = {}
        self.read: set[tuple[str, str]] = set()
        self.shared: dict[str, Value] = {}
        self.losses: dict[str, list[Value]] = {role: [] for role in self.build.roles}
        self.loads: dict[str, dict[str, Value]] = {role: {} for role in self.build.roles}
        self.partial: dict[str, dict[str, Value]] = {role: {} for role in self.build.roles}
        self.coming: dict[str, set[str]] = {role: set() for role in self.build.roles}
        self.pieces = {name: self._piece(name) for name in self.gradients if name not in self.padding}
        self._ahead()
        trains = self.build.trains
        saved = self._forwards()
        if trains:
            self._backwards(saved)
        proof = Proof()
        if "loss" in self.expected:
            self._loss()
        told = ["the loss"] * ("loss" in self.expected)
        told += [key for key in self.expected if key.startswith(("output ", "buffer "))]
        of_role = dict.fromkeys(self.build.roles, f"{', '.join(told[:4])}{', …' if len(told) > 4 else ''}")
        if trains:
            of_role |= {
                role: f"the loss, {count} gradient{'s' * (count != 1)}, the norm"
                for role, count in self._gradients().items()
            }
        for text, alike in groupby(of_role, of_role.__getitem__):
            first, *others = alike
            last = f" {'to' if len(others) > 1 else 'and'} {others[-1]}" if others else ""
            proof.lines.append(f"{first}{last}: {text}")
        if self.updates or any(action == "LOADS" for _, action in self.build.programs):
            self._loads()
        for program in self.build.programs.values():
            if program.action == "RESCALE":
                self._rescale(program)
        for program in self.build.programs.values():
            if (program.role, program.action) in self.read or program.action in _BEYOND:
                continue
            if program.action in _KNOWN or any(not key.startswith("metric ") for key, _ in program.main.returns):
                raise Malformed(f"{program.file}: is no part of a step")
            proof.lines.append(f"{program.role}: {program.action} returns metrics of one's own, which are not proved")
        for row in self.reader.own.values():
            proof.lines.append(f"{row.op} is what its rule says, {row.text}, which is not proved")
        proof.nodes = len(self.table.nodes)
        return proof

    def _piece(self, name: str) -> Value:
        """Return a rank's piece of the model's gradient of a parameter."""
        type_ = self.stored.get(name)
        if type_ is None:
            raise Malformed(f"the manifest stores no `{name}`")
        return self.reader.alike.value(
            ("piece", id(type_)), [self.gradients[name]], lambda value: self.tensors.cut(value, type_)
        )

    def _ahead(self) -> None:
        """Run what comes before the work of a step."""
        first = next(iter(self.build.roles))
        if (program := self.build.program(first, "COUNT")) is not None:
            counts = self._only(program, self.run(program, {}).values, "count", "sum")
            self.shared |= {key: self.over_microbatches(value) for key, value in counts.items()}
        if (program := self.build.program(first, "SCALE")) is not None:
            results = self.run(program, self.shared).values
            self.shared |= results
            for key, value in results.items():
                unscaled = key == "scale" and "unscale" in results
                number = self.tensors.times(value, results["unscale"]) if unscaled else value
                if key != "unscale":
                    if key not in self.scales:
                        raise Malformed(f"{program.file}: returns `{key}`, which the model does not")
                    self.same(program, key, number, self.scales[key])
        self.weights: dict[str, Returned] = {}
        for role in self.build.roles:
            program = self.build.programs.get((role, "UNSHARD"))
            self.weights[role] = Returned({}) if program is None else self.run(program, self.shared)
            if program is not None:
                self._only(program, self.weights[role].values, "weight")

    def _forwards(self) -> dict[int, dict[str, Value]]:
        """Run F of every stage. Return what each saves for its backward."""
        saved: dict[int, dict[str, Value]] = {}
        sent: dict[str, Value] = {}
        returned: set[str] = set()
        for stage, role in sorted(self.stages.items()):
            program, weights = self._needed(stage, "F"), self.weights[role]
            results = self.run(program, {**self.shared, **weights.values, **received(sent)}, weights.coming).values
            saved[stage], sent = {}, {}
            types = dict(program.main.returns)
            for key, value in results.items():
                kind, _, name = key.partition(" ")
                new = kind == "sent" and not self.padding and value.node >= self.reader.of_model
                if new and not program.main.type_of(types[key]).partial:  # all that later stages make would be new
                    raise self._unlike(f"{program.file}: the sent `{name}`", value)
                if kind in ("saved", "sent"):
                    (saved[stage] if kind == "saved" else sent)[key] = value
                elif key == "loss":
                    self.losses[role].append(value)
                elif kind == "load":
                    self.loads[role][name] = self.over_microbatches(value)
                elif key in self.expected and kind in ("output", "buffer"):
                    type_ = program.main.type_of(types[key])
                    expected, short = self.expected[key], self.expected[key].shape
                    rows = [(d, 1, a, b) for d, (a, b) in enumerate(zip(short, type_.shape, strict=False)) if a < b]
                    if rows and self.padding and len(short) == len(type_.shape):
                        self.same(program, key, real_whole(self.tensors, value, type_, rows), expected)
                    else:
                        self.same(program, key, value, self.tensors.cut(expected, type_))
                else:
                    raise Malformed(f"{program.file}: returns `{key}`, which the model does not")
                returned.add(key)
        if missing := [key for key in self.expected if key not in returned]:
            raise Malformed(f"no program returns `{missing[0]}`, which the model does")
        if sent:
            raise Malformed(f"the last stage sends `{min(sent)}`")
        return saved

    def _backwards(self, saved: Mapping[int, Mapping[str, Value]]) -> None:
        """Run B of every stage, or I and W, and add the gradients to those of the role. A stage that does both makes
        the same by both."""
        sent: dict[str, Value] = {}
        for stage, role in sorted(self.stages.items(), reverse=True):
            given = {**self.shared, **self.weights[role].values}
            read = {"B": {**given, **saved[stage], **received(sent)}}
            done = self.build.work_of(stage)
            program = self._needed(stage, done[-1])
            each: dict[str, Value] = {}
            if "B" in done:
                each = dict(self.run(self._needed(stage, "B"), read["B"]).values)
            if "I" in done:
                phases = self._phases(stage, given, read)
                differ = phases.keys() != each.keys() or bound_to("sent", phases) != bound_to("sent", each)
                if each and (differ or not all(self._equal(phases[k], each[k]) for k in each)):
                    raise Refused(f"{program.file}: I and W of the stage make other gradients than B")
                each = phases
            sent = {key: value for key, value in each.items() if key.startswith("sent ")}
            parts = {key: value for key, value in each.items() if not key.startswith(("sent ", "state "))}
            sums = {key: self.over_microbatches(value) for key, value in parts.items()}
            for other in {*done} - {done[-1], "F"}:
                unused = self._needed(stage, other)
                if f"{unused.main.name}_last" in unused.functions:
                    raise Malformed(f"{unused.file}: is not what the stage does last, and has a function for that")
            last = f"{program.main.name}_last"
            if last in program.functions:
                # what earlier microbatches added up to is all of them, less the last one's own
                before = {
                    f"gradient {key}": self.reader.alike.value("before", [total, parts[key]], self._difference)
                    for key, total in sums.items()
                }
                at_end = self.run(program, {**read[done[-1]], **before}, function=last)
                usual = {key: value for key, value in each.items() if done[-1] == "B" or not key.startswith("sent ")}
                if bound_to("sent", at_end.values) != bound_to("sent", usual):
                    raise Refused(f"{program.file}: the last backward sends in another order")
                sums |= self._last(program, at_end, usual)
                self.coming[role] |= {f"gradient {key}" for key in at_end.coming}
            gradients = self.partial[role]
            for key, value in sums.items():
                gradients[key] = self.tensors.plus(gradients[key], value) if key in gradients else value
        if sent:
            raise Malformed(f"the first stage sends `{min(sent)}`")

    def _phases(self, stage: int, given: Mapping[str, Value], read: dict[str, dict[str, Value]]) -> dict[str, Value]:
        """Run I and W of a stage: I returns what it sends and what is deferred, W gradients. ``read`` has what B may
        read, and gets what W may."""
        inputs, weights = self._needed(stage, "I"), self._needed(stage, "W")
        first = self.run(inputs, read["B"]).values
        kinds: dict[str, dict[str, Value]] = {"sent": {}, "deferred": {}}
        for key, value in first.items():
            if (kind := key.partition(" ")[0]) not in kinds:
                raise Malformed(f"{inputs.file}: returns `{key}`, which is neither sent nor deferred")
            kinds[kind][key] = value
        read["W"] = {**given, **kinds["deferred"]}
        second = self.run(weights, read["W"]).values
        if wrong := [key for key in second if key.startswith("sent ")]:
            raise Refused(f"{weights.file}: returns `{wrong[0]}`")
        return {**kinds["sent"], **second}

    def _difference(self, one: Value, other: Value) -> Value:
        return self.tensors.plus(one, other, by=(1, -1))

    def _last(self, program: Program, at_end: Returned, each: Mapping[str, Value]) -> dict[str, Value]:
        """Return the gradients that the last backward adds to those of earlier microbatches, and begins to reduce.

        Raises:
            Refused: it sends or returns otherwise than the backwards before it.
        """
        read = {p.binding for p in program.functions[f"{program.main.name}_last"].parameters}
        sums = {}
        for key, value in at_end.values.items():
            if key.startswith("state residual"):
                self.same(program, key, value, self.table.constant(0, value.shape))
            elif f"gradient {key}" in read:
                sums[key] = value
            elif key in each and self._equal(value, each[key]):
                continue
            elif self.microbatches > 1 or key not in each or key.startswith("sent "):
                raise Refused(f"{program.file}: the last backward makes another `{key}`")
            else:
                sums[key] = value
        return sums

    def _needed(self, stage: int, action: str) -> Program:
        program = self.build.programs.get((f"stage{stage}", action))
        if program is None:
            raise Malformed(f"there is no program stage{stage}.{action}")
        return program

    # ---- what leaves a step

    def _loss(self) -> None:
        known = {}
        for role, parts in self.losses.items():
            total = {"loss": self.over_microbatches(self.tensors.plus(*parts))} if parts else {}
            known[role] = {**self.shared, **total}
        expected = self.tensors.times(self.over_microbatches(self.expected["loss"]), self.scales["scale"])
        for role, returned in self._together("LOSS", known).items():
            program = self.build.programs[role, "LOSS"]
            value = self._only(program, returned.values, "loss").get("loss")
            if value is None:
                raise Malformed(f"{program.file}: returns no loss")
            self.same(program, "loss", value, expected)

    def _gradients(self) -> dict[str, int]:
        """Prove the gradients that REDUCE of every role returns, and their norm. Return the number of each role's."""
        known = {
            role: {**self.shared, **{f"gradient {key}": value for key, value in parts.items()}}
            for role, parts in self.partial.items()
        }
        symbols = {
            name: self.tensors.piece(self.table.leaf(f"gradient {name}", self.stored[name].shape), self.stored[name])
            for name in self.gradients
        }
        results = self._together("REDUCE", known, {role: self._settled(role, symbols) for role in self.build.roles})
        if self.unlike is not None:
            program, key, value, expected = self.unlike
            raise self._unlike(f"{program.file}: `{key}`", value, describe(self.table, value, expected))
        squares = [self.tensors.over(self.tensors.squares(symbol), sorted(symbol.axes)) for symbol in symbols.values()]
        norm = self.tensors.pointwise("sqrt", [self.tensors.plus(*squares)]) if squares else None
        counts, seen = {}, set[str]()
        for role, returned in results.items():
            program = self.build.programs[role, "REDUCE"]
            names = {key.partition(" ")[2] for key in returned.values if key.startswith("gradient ")}
            for key, value in returned.values.items():
                kind, _, name = key.partition(" ")
                if key.startswith("state residual"):
                    self.same(program, key, value, self.table.constant(0, value.shape))
                elif kind == "gradient" and name in symbols:
                    self.same(program, key, value, symbols[name])  # one value may be returned under two names
                elif kind not in ("gradient", "grad_norm"):
                    raise Malformed(f"{program.file}: returns `{key}`, which nothing takes")
            for name in sorted(names - self.gradients.keys()):
                raise Refused(f"{program.file}: returns a gradient of `{name}`, on which the loss does not depend")
            if norm is not None:
                if "grad_norm" not in returned.values:
                    raise Malformed(f"{program.file}: returns no norm")
                self.same(program, "grad_norm", returned.values["grad_norm"], norm)
            for name in sorted(self.partial[role].keys() - names):
                raise Malformed(f"{program.file}: does not return the gradient of `{name}`")
            seen |= names
            counts[role] = len(names)
        if missing := sorted(self.gradients.keys() - seen):
            raise Refused(f"no role returns the gradient of `{missing[0]}`, on which the loss depends")
        return counts

    def _settled(self, role: str, symbols: Mapping[str, Value]) -> Settle:
        """Return a function that proves each gradient that REDUCE returns, and lets all lines read a symbol of it."""
        program = self.build.programs[role, "REDUCE"]
        names = {
            name: key.partition(" ")[2]
            for key, name in program.main.returns
            if key.startswith("gradient ") and key.partition(" ")[2] in symbols
        }

        def settle(name: str, value: Value) -> Value:
            gradient = names.get(name)
            if gradient is None:
                return value
            if (rows := self.padding.get(gradient)) is None:
                expected = self.pieces[gradient]
            else:  # that the rest is zero, parc's check of padding proves
                expected = self.gradients[gradient]
                value = real_whole(self.tensors, value, self.stored[gradient], rows)
            try:
                self.same(program, f"gradient {gradient}", value, expected)
            except Unlike:  # others that are the model's tell which lines are right
                if self.reader.suspects is None:
                    raise
                self.unlike = self.unlike or (program, f"gradient {gradient}", value, expected)
            return symbols[gradient]

        return settle

    def _loads(self) -> None:
        """Prove what LOADS of every role returns: the tokens of each expert over the step, and the biases that they
        move."""
        known = {
            role: {**self.shared, **{f"load {key}": value for key, value in parts.items()}}
            for role, parts in self.loads.items()
        }
        loads = [self.over_microbatches(value) for key, value in self.expected.items() if key.startswith("load ")]
        expected = {"metric load": self.tensors.cat(loads, 0), **self.updates}
        returned: set[str] = set()
        for role, results in self._together("LOADS", known).items():
            program = self.build.programs[role, "LOADS"]
            types = dict(program.main.returns)
            for key, value in results.values.items():
                if key not in expected:
                    raise Malformed(f"{program.file}: `{key}` is not in model.py")
                self.same(program, key, value, self.tensors.cut(expected[key], program.main.type_of(types[key])))
                returned.add(key)
        if missing := sorted(expected.keys() - returned):
            raise Malformed(f"no role returns `{missing[0]}`, which the model moves in a step")

    def _rescale(self, program: Program) -> None:
        """Prove that the loss scale of the next step is that of dynamic loss scaling, which is never zero."""
        state = self.build.manifest.get("state")
        if not isinstance(state, dict) or not isinstance(state.get("loss_scale"), float) or state["loss_scale"] <= 0:
            raise Refused("manifest.json begins with no loss scale")
        norm, *before = (self.tensors.leaf(name, ()) for name in ("grad_norm", *(f"state {s}" for s in _LOSS_SCALE)))
        values = self._only(program, self.run(program, {"grad_norm": norm}).values, "state")
        for name in _LOSS_SCALE:
            expected = self.tensors.pointwise(f"next {name}", [norm, *before])
            if (value := values.get(f"state {name}")) is None:
                raise Malformed(f"{program.file}: returns no `state {name}`")
            self.same(program, f"state {name}", value, expected)

    def _together(
        self, action: str, known: Mapping[str, Mapping[str, Value]], settle: Mapping[str, Settle] = {}
    ) -> dict[str, Returned]:
        """Run a program of every role, all of them together: sums among roles add what each of them has there."""
        running: dict[str, Generator[Any, Value, Returned]] = {}
        results: dict[str, Returned] = {}
        waiting: dict[str, tuple[Any, Value]] = {}
        roles = list(self.build.roles)
        answers: dict[str, Any] = {}
        for role in roles:
            program = self.build.programs.get((role, action))
            if program is None:
                raise Malformed(f"there is no program {role}.{action}")
            main, keep = program.main, settle.get(role, lambda name, value: value)
            operands, coming = self.arguments(program, main, known[role]), self.coming[role]
            running[role] = self.reader.steps(program, main, operands, coming if action == "REDUCE" else (), keep)
            answers[role] = None
        while running:
            for role in list(running):
                if role in waiting:
                    continue
                try:
                    waiting[role] = running[role].send(answers[role])
                except StopIteration as end:
                    results[role] = end.value
                    del running[role]
            if not running:
                break
            place = next(iter(waiting.values()))[0]
            members = [role for at in sorted(set(place[1])) if (role := f"{place[0]}{at}") in roles]
            if (
                len(members) != len(place[1])
                or any(member not in waiting or waiting[member][0] != place for member in members)
                or not members
            ):
                raise Refused(f"roles do not meet at a sum over {list(place[1])} of `{place[0]}` in {action}")
            total = self.tensors.plus(*(waiting[member][1] for member in members))
            if self.reader.suspects is not None:
                self.reader.suspects.follow([waiting[member][1] for member in members], total)
            for member in members:
                answers[member] = total
                del waiting[member]
        return results

    def _only(self, program: Program, values: dict[str, Value], *kinds: str) -> dict[str, Value]:
        """Return what a program returns, which has names of these kinds alone: no other program finds it by another.

        Raises:
            Refused: it has others.
        """
        for key in values:
            if key.partition(" ")[0] not in kinds:
                raise Malformed(f"{program.file}: returns `{key}`, which nothing takes")
        return values

    # ---- comparison

    def _equal(self, one: Value, other: Value) -> bool:
        return one == other or self.tensors.canonical(one, other)

    def same(self, program: Program, key: str, value: Value, expected: Value) -> None:
        """Refuse a result that is not what the model says."""
        if not (value == expected if self.unlike else self._equal(value, expected)):
            raise self._unlike(f"{program.file}: `{key}`", value, describe(self.table, value, expected))
        if self.reader.suspects is not None:
            self.reader.suspects.proved(value)

    def _unlike(self, what: str, value: Value, difference: str = "") -> Unlike:
        """Return the refusal of a value that is not what the model says, with the first lines that make others."""
        lines = [] if self.reader.suspects is None else self.reader.suspects.told(value)
        told = [f"makes of known values one that the model has not: {line}" for line in lines]
        return Unlike("\n".join([f"{what} is not proved to be what model.py says", *told, *difference.splitlines()]))
