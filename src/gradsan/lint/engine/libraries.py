"""Library functions in the abstract interpreter, Python builtins, and the iterables of loops."""

from __future__ import annotations

import ast

from gradsan.lint.engine.methods import Methods
from gradsan.lint.engine.state import State
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    Bag,
    Choice,
    ClassValue,
    Dictionary,
    Function,
    Layer,
    Memory,
    Node,
    Parameters,
    Plain,
    Saved,
    Sequence,
    Tensor,
    Value,
    is_data,
    words,
)

_PASSING = words(
    """
    list tuple reversed sorted iter set tqdm trange next deque
    """
)
_WRAPPING = ("DataParallel", "DistributedDataParallel", "compile", "FullyShardedDataParallel", "script")
_NO_TENSORS = words(
    """
    numpy math os sys re random time json logging collections itertools functools argparse pathlib copy typing
    tqdm matplotlib pandas sklearn scipy cv2 PIL wandb gym gymnasium yaml pickle glob datetime warnings string
    shutil
    """
)


class Libraries(Methods):
    """Interpreter of calls of known library functions, and of containers."""

    def _container_method(
        self, owner: Sequence | Dictionary | Parameters, name: str, args: list[Value], state: State
    ) -> Value:
        if isinstance(owner, Sequence):
            items: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            if name in ("append", "appendleft", "add", "insert", "push") and args:
                state.heap[owner, "@items"] = (*items, args[-1])[-60:]
            elif name == "extend" and args:
                state.heap[owner, "@items"] = (*items, *self.items_of(args[0], state))[-60:]
            elif name == "clear":
                state.heap[owner, "@items"] = ()
            elif name in ("pop", "popleft") and items:
                is_first = name == "popleft" or (bool(args) and self.constant(args[0]) == 0)
                state.heap[owner, "@items"] = items[1:] if is_first else items[:-1]
                return items[0 if is_first else -1]
            elif name in ("pop", "popleft"):
                return self.fresh()
            elif name == "copy":
                return owner
            return Plain()
        if isinstance(owner, Dictionary):
            held = state.heap.get((owner, "@entries"))
            entries: dict[object, Value] = held if isinstance(held, dict) else {}
            if name in ("values", "items", "keys"):
                made = Sequence("list")
                values: list[Value] = []
                for key, value in list(entries.items())[:12]:
                    pair = Sequence("tuple")
                    state.heap[pair, "@items"] = (Plain(key, key is not ...), value)
                    values.append(value if name == "values" else pair if name == "items" else Plain(key, True))
                state.heap[made, "@items"] = tuple(values)
                return made
            if name == "clear":
                state.heap[owner, "@entries"] = {}
                return Plain(None, True)
            if name in ("get", "pop", "setdefault") and args:
                key = self.constant(args[0])
                if isinstance(key, str | int) and key in entries:
                    if name == "pop":
                        state.heap[owner, "@entries"] = {one: held for one, held in entries.items() if one != key}
                    return entries[key]
                return args[1] if len(args) > 1 else self.fresh()
            if name == "update" and args:
                more = state.heap.get((args[0], "@entries"))
                state.heap[owner, "@entries"] = {**entries, **(more if isinstance(more, dict) else {})}
            return Plain()
        return Plain()

    def items_of(self, value: Value, state: State) -> list[Value]:
        """The known elements of a container."""
        if isinstance(value, Sequence | Bag):
            return self.held(value, state)
        if isinstance(value, Dictionary):
            entries = state.heap.get((value, "@entries"))
            return [Plain(key, key is not ...) for key in entries] if isinstance(entries, dict) else []
        return [value] if isinstance(value, Parameters) else []

    def _any_tensor(self, args: list[Value], state: State) -> bool:
        return any(self.tensors_in(one, state) for one in args)

    def _call_path(
        self, path: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        root, _, _ = path.partition(".")
        name = path.rpartition(".")[2]
        if root == "builtins":
            return self._builtin(name, args, keywords, node, state)
        if path.startswith("torch.optim.") and name[:1].isupper() and "lr_scheduler" not in path and "swa" not in path:
            return self.make_optimizer(name, args, keywords, node, state)
        if path.startswith(("torch.nn.utils.", "torch.nn.init.", "torch.distributed", "torch.utils.data")):
            if name in ("spectral_norm", "weight_norm", "spectral_norm_") and args:
                return args[0]
            return Plain()
        if name in _WRAPPING and root == "torch" and args:
            return args[0]
        if path.startswith("torch.nn.") and name[:1].isupper():
            return self.make_layer(name, args, keywords, node, state)
        if path == "torch.autograd.grad":
            return self.gradient(args, keywords, node, state)
        if path == "torch.autograd.backward" and args:
            self.run_backward(args[0], keywords, args[2:], node, state)
            return Plain(None, True)
        if path in ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint") and args:
            return self._checkpoint(args, node, state)
        if name == "Variable" and root == "torch" and args:
            return args[0] if "requires_grad" not in keywords else self.fresh(certain=True)
        if name == "deepcopy" and args:
            copied = args[0]
            if isinstance(copied, Layer):
                return Layer(copied.kind, copied.site, Memory(), copied.inplace, copied.has_weights)
            return self.fresh() if not isinstance(copied, Plain) else copied
        if path == "itertools.chain":
            made = Sequence("list")
            state.heap[made, "@items"] = tuple(args)
            return made
        if path == "torch.set_grad_enabled" and args:
            known = self.constant(args[0])
            state.grad = bool(known) if isinstance(known, bool) else state.grad
            return Plain()
        if path == "functools.partial" and args and isinstance(args[0], Function | ClassValue):
            return self.fresh()
        if path in ("torch.is_grad_enabled",):
            return Plain(state.grad, True)
        if path.startswith("torch.jit.is_"):
            return Plain(False, True)
        if root == "torch" and not path.startswith(
            ("torch.cuda", "torch.backends", "torch.profiler", "torch.distributions")
        ):
            if name[:1].isupper():
                return self.fresh()
            return self.by_name(name, args, keywords, node, state)
        if root in _NO_TENSORS and not (root == "tqdm" and args):
            return (
                Plain()
                if root != "numpy"
                else Tensor((Memory(),), NO, None, self.tick(), is_certain=False, is_cut=True, is_array=True)
            )
        if name in _PASSING and args:
            return args[0]
        return self.call_unknown(Plain(), [*args, *keywords.values()], node, state, name)

    def _checkpoint(self, args: list[Value], node: ast.AST, state: State) -> Value:
        begun = self.clock
        result = self.call(args[0], args[1:], {}, node, state)
        self.rerun.append((begun, self.clock))
        made = self.tensor_of(result)
        if made is not None and made.node is not None:
            saved = [
                Saved(one.memories, made.clock, "input", made.grad, state.branches, False, one.text)
                for value in args[1:]
                for one in self.tensors_in(value, state)
            ]
            made.node.saved = (*made.node.saved, *saved)
        return result

    def _builtin(self, name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        if name in ("list", "tuple", "set", "sorted", "reversed", "iter"):
            if not args:
                made = Sequence("list")
                state.heap[made, "@items"] = ()
                return made
            if isinstance(args[0], Tensor) and args[0].is_certain:
                return self.pieces(args[0], node, state)
            return args[0]
        if name == "dict":
            entries = Dictionary()
            state.heap[entries, "@entries"] = dict(keywords)
            return entries
        if name == "sum" and args:
            items = self.items_of(args[0], state)
            tensors = [one for one in items if isinstance(one, Tensor)]
            return self.apply("add", list(tensors), node, state) if tensors else self.fresh()
        if name == "getattr" and len(args) > 1:
            text = self.constant(args[1])
            return self.attribute(args[0], text, node, state) if isinstance(text, str) else self.fresh()
        if name == "setattr" and len(args) > 2:
            text = self.constant(args[1])
            if isinstance(text, str):
                self.set_attribute(args[0], text, args[2], state)
            return Plain(None, True)
        if name == "next" and args:
            items = self.items_of(args[0], state)
            return items[0] if items and not isinstance(items[0], Parameters) else self.fresh()
        if name == "zip":
            return self._zip(args, node, state)
        if name == "enumerate" and args:
            return self._zip([Plain(), args[0]], node, state)
        if name == "filter" and len(args) > 1:
            return args[1]
        if name == "map" and len(args) > 1:
            made = Sequence("list")
            items = [self.call(args[0], [one], {}, node, state) for one in self.rounds_of(args[1], node, state)]
            state.heap[made, "@items"] = tuple(items)
            return made
        if name in ("range",):
            made = Sequence("range")
            known = self.constant(args[-1]) if len(args) == 1 else ...
            state.heap[made, "@items"] = (Plain(),) if known == 1 else (Plain(), Plain())
            return made
        if name in ("max", "min", "abs", "pow", "divmod") and self._any_tensor(args, state):
            return self.by_name(name, args, keywords, node, state) if name in ("abs", "pow") else self.fresh()
        if name in ("isinstance", "hasattr", "callable", "issubclass"):
            return Plain()
        return Plain()

    def _zip(self, args: list[Value], node: ast.AST, state: State) -> Value:
        columns = [self.rounds_of(one, node, state) for one in args]
        # An unknown iterable is as long as the others.
        length = min(
            (len(one) for one, arg in zip(columns, args, strict=True) if not isinstance(arg, Plain)), default=2
        )
        made = Sequence("list")
        rows: list[Value] = []
        for index in range(length):
            row = Sequence("tuple")
            state.heap[row, "@items"] = tuple(
                one[index] if index < len(one) else (one[-1] if one else Plain()) for one in columns
            )
            rows.append(row)
        state.heap[made, "@items"] = tuple(rows)
        return made

    def rounds_of(self, value: Value, node: ast.AST, state: State) -> list[Value]:
        """The values of the variable of a loop over ``value``, iteration by iteration."""
        if isinstance(value, Choice):
            value = next((one for one in value.values if not isinstance(one, Plain)), Plain())
        if isinstance(value, Sequence) and value.kind == "pieces":
            items: tuple[Value, ...] = state.heap.get((value, "@items"), ())  # type: ignore[assignment]
            return list(items[:2])
        if isinstance(value, Sequence | Bag | Dictionary) and (
            (value, "@items") in state.heap or (value, "@entries") in state.heap
        ):
            found = self.items_of(value, state)
            if any(isinstance(one, Parameters) for one in found):
                return [one for item in found for one in self.rounds_of(item, node, state)]
            return found[:6]
        if isinstance(value, Parameters):
            tensors: list[Value] = []
            leaves = self.leaves_of(Parameters(value.owners), state)
            for leaf in leaves[:4]:
                tensor = self._parameter(leaf, state)
                if value.shape == "pair":
                    pair = Sequence("tuple")
                    state.heap[pair, "@items"] = (Plain(), tensor)
                    tensors.append(pair)
                else:
                    tensors.append(tensor)
            return tensors * 2 if len(tensors) == 1 else tensors
        if isinstance(value, Tensor) and value.is_certain and not value.is_array:
            return self.rounds_of(self.pieces(value, node, state), node, state)
        # Of code that is not analysed, progress bars and samplers hand out what each round makes.
        if isinstance(value, Tensor) and (value.node is None or not is_data(value.node)):
            return [self.part_of(value, state), self.part_of(value, state)]
        return [self.fresh(), self.fresh()]

    def _parameter(self, leaf: Value, state: State) -> Tensor:
        if isinstance(leaf, Layer):
            return self.parameter_of(leaf, state)
        if isinstance(leaf, Tensor):
            return leaf if leaf.is_certain else self.weights_of_unknown(leaf, state)
        return self.fresh()

    def part_of(self, value: Tensor, state: State) -> Tensor:
        """A part of an unknown value, which is unknown, too."""
        grad = self.graph_of(value, state)[1]
        made = self.fresh(grad=min(grad, MAYBE) if value.is_certain or grad == NO else MAYBE)
        graph = value.node
        made.is_array = value.is_array
        if graph is not None and state.grad:
            made.node = Node("part", (graph,), (), self.site(self.statement), made.clock, made.grad)
        return made
