"""Random programs that PyTorch might run: from a seed, always the same one.

Each statement is tried on the reference before it is taken, so a program has no numbers out of bounds. What PyTorch
refuses (a leaf written in place, a view of many) is found by running it, and left out (``judge.py``).
"""

from __future__ import annotations

import random
import string

import operations as o
import statements as s
import torch
from reference_run import NotAProgramError, Reference, Variable

_SHAPES = ((2, 3), (2, 3), (3, 2), (3, 3), (3,), (4,), (6,), (2,), (), (1, 2, 3))
_OPTIMIZERS = (
    ("SGD", "lr=0.1"),
    ("SGD", "lr=0.1, momentum=0.9, foreach=True"),
    ("SGD", "lr=0.1, fused=True"),
    ("Adam", "lr=0.05, foreach=False"),
    ("Adam", "lr=0.05, fused=True"),
    ("AdamW", "lr=0.05, fused=True"),
    ("Adagrad", "lr=0.05, fused=True"),
    ("RMSprop", "lr=0.01"),
    ("Adadelta", "lr=0.5"),
)


class Author:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._reference = Reference()
        self._program: list[s.Statement] = []
        self._leaves: list[str] = []
        self._optimizer: str | None = None
        self._names = iter([*(letter for letter in string.ascii_lowercase), *(f"v{number}" for number in range(99))])
        self._replaced: set[str] = set()
        self._touched: list[str] = []

    def write(self) -> s.Program:
        """The program."""
        pick = self._random
        main = pick.choice(_SHAPES)
        for position in range(pick.randint(2, 4)):
            shape = main if pick.random() < 0.75 else pick.choice(_SHAPES)
            self._take(s.Tensor(self._name(), shape, pick.randrange(1000), leaf=position == 0 or pick.random() < 0.5))
        self._leaves = [one.name for one in self._program if isinstance(one, s.Tensor) and one.leaf]
        kinds = {
            self._compute: 30,
            self._view: 12,
            self._write: 26,
            self._pass_by: 14,
            self._alias: 5,
            self._backward: 5,
            self._step: 6,
            self._hook: 3,
            self._replace: 1,
        }
        for _ in range(pick.randint(4, 16)):
            [kind] = pick.choices(list(kinds), list(kinds.values()))
            kind()
        self._backward(last=True)
        return tuple(self._program)

    def _name(self) -> str:
        return next(self._names)

    def _take(self, statement: s.Statement | None) -> bool:
        if statement is None:
            return False
        try:
            self._reference.run(statement)
        except NotAProgramError:
            return False
        self._program.append(statement)
        return True

    def _some(self, rank: tuple[int, ...] | None = None, arrays: bool = False) -> str | None:
        """A variable, rather a young one."""
        fitting = [
            name
            for name, one in self._reference.variables.items()
            if (rank is None or len(one.shape) in rank) and one.array == arrays
        ]
        if not fitting:
            return None
        return fitting[-1 - min(int(self._random.expovariate(0.4)), len(fitting) - 1)]

    def _target(self, rank: tuple[int, ...] | None) -> str | None:
        """What to write: rather something that an operation has taken or made."""
        fitting = [name for name in self._touched if rank is None or len(self._variable(name).shape) in rank]
        if fitting and self._random.random() < 0.7:
            return self._random.choice(fitting[-6:])
        return self._some(rank)

    def _variable(self, name: str) -> Variable:
        return self._reference.variables[name]

    def _like(self, name: str, other_storage: bool) -> str:
        """A tensor of the shape of ``name``; where nothing of the program fits, a constant."""
        target = self._variable(name)
        fitting = [
            other
            for other, one in self._reference.variables.items()
            if one.shape == target.shape and not one.array and not (other_storage and one.storage is target.storage)
        ]
        if fitting and self._random.random() < 0.8:
            return self._random.choice(fitting)
        return self._constant(target.shape)

    def _constant(self, shape: tuple[int, ...]) -> str:
        return f"values({', '.join(map(str, (self._random.randrange(1000), *shape)))})"

    def _filled(self, template: str, name: str) -> dict[str, str]:
        """What the fields of a template become for the tensor ``name``."""
        shape, pick = self._variable(name).shape, self._random
        rows = max(1, shape[0]) if shape else 1
        columns = max(1, shape[-1]) if shape else 1
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(pick.randrange(99))) > 0.5
        order = list(range(rows))
        pick.shuffle(order)
        places = torch.tensor(order).reshape(-1, *[1] * (len(shape) - 1)).expand(shape or (1,))
        same = self._like(name, other_storage=True)
        small = f"{same}.sum(0)" if shape and pick.random() < 0.5 else self._constant(shape[1:])
        return {
            "t": name,
            "same": same,
            "small": small,
            "scalar": f"{same}.mean()",
            "constant": self._constant(shape),
            "mask": f"torch.tensor({mask.tolist()})",
            "rows": f"torch.tensor([{pick.randrange(rows)}])",
            "all_rows": f"torch.tensor({order})",
            "places": f"torch.tensor({places.tolist()})",
            "one_place": f"torch.tensor([{pick.randrange(rows)}])",
            "matrix": same,
            "square": self._constant((columns, columns)),
            "vector": same,
            "column": self._constant((rows,)),
            "row": self._constant((columns,)),
        }

    def _compute(self) -> None:
        pick = self._random
        first = self._some()
        if first is None:
            return
        second = self._like(first, other_storage=False)
        choice = pick.random()
        if choice < 0.5:
            text = pick.choice(o.UNARY).format(first)
        elif choice < 0.9 or len(self._variable(first).shape) != 2:
            text = pick.choice(o.BINARY).format(first, second)
        else:
            text = pick.choice(o.PRODUCTS).format(first, second)
        name = self._name()
        if self._take(s.Compute(name, text, no_grad=pick.random() < 0.05)):
            self._touched += [one for one in (first, second, name) if one.isidentifier()]

    def _view(self) -> None:
        of = self._some()
        if of is not None:
            way = self._random.choice(o.VIEWS.get(len(self._variable(of).shape), (".view(-1)",)))
            self._take(s.View(self._name(), of, way))

    def _write(self) -> None:
        """A write by PyTorch's own means, under grad mode or not."""
        pick = self._random
        kind = pick.choices((o.METHODS, o.STATEMENTS, o.FUNCTIONS, o.OUT), (60, 15, 15, 10))[0]
        operation = pick.choice(kind)
        target = self._target(operation.rank)
        if target is None:
            return
        # A leaf may be written under no_grad only.
        no_grad = pick.random() < 0.35 or self._variable(target).family.is_leaf
        fields = self._filled(operation.call, target)
        call = operation.call.format_map(fields)
        text = operation.first + (f"{target}{call}" if kind in (o.METHODS, o.STATEMENTS) else call)
        self._take(
            s.Write(
                text,
                ((target, operation.result.format_map(fields)),),
                recorded=operation.is_recorded,
                no_grad=no_grad or kind is o.OUT,
            )
        )

    def _pass_by(self) -> None:
        """A write through an alias that is made for it."""
        pick = self._random
        if pick.random() < 0.3:
            operation = pick.choice(o.RAW)
            target = self._target(operation.rank)
            if target is not None:
                fields = {"t": target}
                result = ((target, operation.result.format_map(fields)),)
                self._take(s.Write(operation.call.format_map(fields), result, recorded=False))
            return
        operation = pick.choice(o.METHODS)
        target = self._target(operation.rank)
        if target is None:
            return
        alias = pick.choice(o.ALIASES).format(t=target)
        fields = self._filled(operation.call, target)
        text = operation.first + alias + operation.call.format_map(fields)
        self._take(s.Write(text, ((target, operation.result.format_map(fields)),), recorded=False, no_grad=True))

    def _alias(self) -> None:
        """An alias that stays, or a write through one."""
        pick = self._random
        array = self._some(arrays=True)
        if array is not None and pick.random() < 0.7:
            self._take(s.Write(f"{array}[...] *= 1.5", ((array, f"{array} * 1.5"),), recorded=False))
            return
        of = self._some()
        if of is None:
            return
        shape = self._variable(of).shape
        if shape and pick.random() < 0.2:
            self._take(s.Alias(self._name(), of, "{}.unsafe_split(1)[0]", "[:1]", keeps_graph=True))
        elif pick.random() < 0.3:
            self._take(s.Alias(self._name(), of, "{}.detach().numpy()", array=True))
        else:
            self._take(s.Alias(self._name(), of, pick.choice(o.ALIASES).replace("{t}", "{0}")))

    def _loss(self) -> str | None:
        pick = self._random
        with_graph = [
            name for name, one in self._reference.variables.items() if one.family.value.requires_grad and not one.array
        ]
        if not with_graph:
            return None
        chosen = pick.sample(with_graph[-6:], min(len(with_graph[-6:]), pick.randint(1, 3)))
        terms = [f"({name} * {self._constant(self._variable(name).shape)}).sum()" for name in chosen]
        return " + ".join(terms)

    def _backward(self, last: bool = False) -> None:
        pick = self._random
        loss = self._loss()
        if loss is None:
            return
        retain = not last and pick.random() < 0.9
        if pick.random() < 0.25:
            self._take(s.Gradients(loss, tuple(self._leaves), retain))
        else:
            self._take(s.Backward(loss, tuple(self._leaves), retain))

    def _step(self) -> None:
        pick = self._random
        if self._optimizer is None:
            kind, options = pick.choice(_OPTIMIZERS)
            chosen = tuple(one for one in self._leaves if one not in self._replaced)
            if not chosen:
                return
            name = f"optimizer_{self._name()}"
            if self._take(s.Optimizer(name, kind, chosen, options)):
                self._optimizer = name
        if self._optimizer is not None:
            self._take(s.Step(self._optimizer, pick.choice(("step", "step", "step", "zero_grad"))))

    def _hook(self) -> None:
        name = self._some()
        if name is not None:
            self._take(s.Hook(name, self._random.choice((0.5, 2.0, -1.0))))

    def _replace(self) -> None:
        """``leaf.data = …``, where no other name has the leaf's memory."""
        name = self._random.choice(self._leaves)
        variable = self._variable(name)
        alone = all(
            one is variable or one.storage is not variable.storage for one in self._reference.variables.values()
        )
        if alone and self._optimizer is None and self._take(s.Replace(name, f"{name} * 1.5")):
            self._replaced.add(name)


def program(seed: int) -> s.Program:
    """The program of a seed."""
    return Author(seed).write()
