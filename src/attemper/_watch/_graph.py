"""Reading attention inside a compiled graph: what dynamo traced, with a thermometer at every fused call.

A graph is looked at first, as `Mode` looks at a forward pass, but by the shapes of its nodes alone; then a `ReadCall`
takes the place of every fused call. What that measures leaves the graph with its other outputs, and what the backward
pass measures as the gradient of a *probe*: an input that nothing depends on.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._foreign import FOREIGN
from ._lineage import Lineage, Weights, tensors
from ._operations import is_softmax, softmax_axis
from ._origin import Origin, measured, origin_of, with_numbers
from ._own import NAME as OWN
from ._read_call import ReadCall
from ._shapes import four_axes, kind_of
from ._sums import OF_FLOW, OF_PRESSURE

FUSED = "scaled_dot_product_attention"
CHECKPOINT = "tag_activation_checkpoint"
UNREADABLE = {
    **dict.fromkeys(("flex_attention", OWN, *FOREIGN), "a kernel that is not torch's fused attention"),
    **dict.fromkeys(
        ("multi_head_attention_forward", "_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
        "torch's own multi-head attention, which is one function to the compiler",
    ),
}
PYTHONS_NAMES = {
    "getitem": "__getitem__",
    "getattr": "__get__",
    "truediv": "div",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}
"""What `operator` calls them, and what torch does."""

SELF = "L['self']"
"""What dynamo calls the module whose forward it compiles."""


class UnreadableError(Exception):
    """The graph has attention in it that can only be read as it runs."""


@dataclass(eq=False)
class Seen:
    """A fused call of a graph."""

    node: fx.Node
    module: str
    """The module that makes it, as dynamo names it."""
    query: Tensor
    key: Tensor
    mask: str | None
    causal: bool
    scale: float | None
    tags: tuple[Any, Any]
    """Where q and k come from."""
    differentiated: tuple[bool, bool]
    """Whether gradients will arrive at q, and at the output."""
    kept: dict[int, fx.Node]
    """The nodes of the graph, by the ids of their values."""
    heads: int | None = None
    """How many are folded into the batch axis, where they are."""
    entries: int = 1
    """Of the batch, in a sequence of the model's."""
    shape: tuple[int, ...] = ()
    """(batch, heads, queries, head_dim), when the graph was made."""
    key_shape: tuple[int, ...] = ()
    batched: bool = False
    """Whether all samples have the batch as their first axis, so that one entry of it will do."""

    def settle(self, heads: int | None, sequences: int) -> None:
        """Note what its module and the inputs of the model tell."""
        self.heads = heads
        self.shape, self.key_shape = (four_axes(tuple(map(int, x.shape)), heads) for x in (self.query, self.key))
        batch = self.shape[0]
        self.entries = batch // sequences if sequences and batch % sequences == 0 else 1
        self.batched = {int(node.meta["example_value"].shape[0]) for node in self.samples.values()} == {batch}

    def probes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the probes, for the pressure and the gradient flow."""
        heads = self.shape[1]
        wanted = {"pressure": (OF_PRESSURE, heads + 1), "flow": (OF_FLOW, heads)}
        return {name: wanted[name] for name, needed in zip(wanted, self.differentiated, strict=True) if needed}

    @functools.cached_property
    def samples(self) -> dict[int, fx.Node]:
        """By id, the nodes to hand out so that the factors of q and k can be measured; none where they are known."""
        found = {}
        for tag, own in zip(self.tags, (self.query, self.key), strict=True):
            for tensor in measured(tag, own):
                found[id(tensor)] = self.kept[id(tensor)]
        return found

    def origins(self, samples: dict[int, Tensor]) -> list[Origin | None]:
        """What happened to q and to k since their projections, with the tensors that `samples` asked for."""
        pairs = zip(self.tags, (self.query, self.key), strict=True)
        return [origin_of(with_numbers(tag, samples), samples.get(id(own), own)) for tag, own in pairs]


# -- looking ----------------------------------------------------------------------------------------------------------


class Look:
    """Every fused call of a graph, in order; raises `UnreadableError` for attention of another kind."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.found: list[Seen] = []
        self.entered: dict[str, str] = {}
        """The modules that have a part in the graph, as dynamo names them, and their classes."""
        self.bodies: list[tuple[fx.GraphModule, fx.Node, Look]] = []
        self.module = module
        self._lineage = Lineage()
        self._nodes: dict[int, fx.Node] = {}

    def run(self, tags: Sequence[Any] = ()) -> list[Any]:
        """Follow every node; `tags` of the inputs, and returned those of the outputs."""
        given = list(tags)
        for node in self.module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                self._nodes[id(value)] = node
            if node.op == "placeholder":
                tag = given.pop(0) if given else None
                if tag is not None and isinstance(value, Tensor):
                    self._lineage.set(value, tag)
            elif node.op in ("call_function", "call_method"):
                self._node(node, value)
            elif node.op == "call_module":
                raise UnreadableError(f"the graph calls {node.target}, of which nothing is known")
            elif node.op == "output":
                if not isinstance(node.args[0], (tuple, list)):
                    raise UnreadableError("the graph returns something that is no tuple")
                return [self._lineage.get(_value(x)) for x in node.args[0]]
        return []

    def _node(self, node: fx.Node, value: Any) -> None:
        name = name_of(node)
        for module, kind in (node.meta.get("nn_module_stack") or {}).values():
            self.entered[module] = getattr(kind, "__name__", str(kind))
        args, kwargs = fx.map_arg(node.args, _value), fx.map_arg(node.kwargs, _value)
        if name == FUSED:
            self._fused(node, args, kwargs, value)
        elif name in UNREADABLE:
            raise UnreadableError(UNREADABLE[name])
        elif name == CHECKPOINT:
            self._checkpoint(node, args, value)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001
            self._other_operator(node)
        elif is_softmax(name):
            self._softmax(name, args, kwargs, value)
        elif name == "__getitem__" and isinstance(args[0], (tuple, list)):
            return  # one of several results, each of which has its tag
        else:
            self._follow(name, args, kwargs, value)

    def _follow(self, name: str, args: Any, kwargs: Any, value: Any) -> None:
        if name in ("matmul", "__matmul__", "bmm", "einsum"):
            for x in tensors(args, kwargs):
                tag = self._lineage.get(x)
                if isinstance(tag, Weights) and tag.unseen:
                    raise UnreadableError("attention is written out in it")
        try:
            self._lineage.follow(name, args, kwargs, value)
        except Exception:
            # It wanted a number of a tensor that has none yet: where this one comes from is not known then.
            return

    def _softmax(self, name: str, args: Any, kwargs: Any, value: Any) -> None:
        given = tensors(args, kwargs)[0]
        if self._lineage.scores(given) is not None:
            raise UnreadableError("attention is written out in it")
        self._lineage.weigh(given, softmax_axis(name, args, kwargs), value)

    def _fused(self, node: fx.Node, args: Any, kwargs: Any, value: Tensor) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key = given["query"], given["key"]
        scale = given.get("scale")
        if isinstance(scale, Tensor) or query.is_nested or not all(query.shape) or not all(key.shape):
            raise UnreadableError("a fused call in it is of an odd kind")
        grad = torch.is_grad_enabled()
        self.found.append(
            Seen(
                node=node,
                module=place_of(node),
                query=query,
                key=key,
                mask=kind_of(given.get("attn_mask")),
                causal=bool(given.get("is_causal", False)),
                scale=None if scale is None else float(scale),
                tags=(self._lineage.get(query), self._lineage.get(key)),
                differentiated=(grad and query.requires_grad, grad and value.requires_grad),
                kept=self._nodes,
            )
        )

    def _checkpoint(self, node: fx.Node, args: Any, value: Any) -> None:
        body = _attribute(self.module, node.args[0])
        if not isinstance(body, fx.GraphModule):
            raise UnreadableError("a checkpoint in it is of an odd kind")
        body = copied(body)  # its own may be kept for what the graph does unread
        look = Look(body)
        tags = look.run([self._lineage.get(x) for x in args[1:]])
        for part, tag in zip(value, tags, strict=False):
            if tag is not None and isinstance(part, Tensor):
                self._lineage.set(part, tag)
        self.entered |= look.entered
        if look.found or look.bodies:
            self.bodies.append((body, node, look))

    def _other_operator(self, node: fx.Node) -> None:
        """One that has graphs within: nothing is changed there, so nothing may be there to read."""
        for argument in node.args:
            body = _attribute(self.module, argument)
            if isinstance(body, fx.GraphModule):
                inner = Look(body)
                inner.run()
                if inner.found or inner.bodies:
                    raise UnreadableError(f"a fused call is inside {node.target}")

    def calls(self) -> list[Seen]:
        """All of them, in the order in which what they measure leaves the graph."""
        return [*self.found, *(seen for _, _, look in self.bodies for seen in look.calls())]


def name_of(node: fx.Node) -> str:
    """What an operation is called."""
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "").split(".")[0]
    name = name.removeprefix("special_")
    return PYTHONS_NAMES.get(name, name) if node.op == "call_function" else name


def _value(x: Any) -> Any:
    return x.meta.get("example_value") if isinstance(x, fx.Node) else x


def _attribute(module: nn.Module, x: Any) -> Any:
    if not isinstance(x, fx.Node) or x.op != "get_attr":
        return None
    return functools.reduce(getattr, str(x.target).split("."), module)


def place_of(node: fx.Node) -> str:
    """The module that a node belongs to, as dynamo names it."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else SELF


# -- where a call is in the model -------------------------------------------------------------------------------------


class Whereabouts:
    """Which module of the model a part of a graph computes, told by the parameters that the graph is called with.

    For one graph may serve many layers.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parameters: list[tuple[int, list[str]]] = []
        """(place among the inputs, name as dynamo has it) of each."""
        for place, node in enumerate(graph.find_nodes(op="placeholder")):
            source = getattr(node.meta.get("grapharg"), "source", None)
            name = getattr(source, "name", "")
            name = name() if callable(name) else name  # it was a method once
            plain = re.sub(r"\._(?:modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]", r".\1", name)
            if plain != name:
                self._parameters.append((place, _parts(plain)))

    def find(self, name: str, inputs: Sequence[Any], known: Mapping[int, list[str]]) -> tuple[int, str] | None:
        """(the input that tells, the path) of a module, as dynamo names it; None where no parameter tells.

        `known` are the model's parameters and buffers: their paths, by id.
        """
        own = _parts(name)
        best, found = 0, None
        for place, parts in self._parameters:
            shared = next((i for i, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), len(own))
            if shared <= best:
                continue
            rest = parts[shared:]
            for path in known.get(id(inputs[place]), ()):
                whole = path.split(".")
                if whole[len(whole) - len(rest) :] == rest:
                    best, found = shared, (place, ".".join([*whole[: len(whole) - len(rest)], *own[shared:]]))
        return found


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part != "_orig_mod"]


# -- reading ----------------------------------------------------------------------------------------------------------


def install(module: fx.GraphModule, look: Look) -> list[tuple[int, int]]:
    """Put a `ReadCall` in the place of every fused call; returns the shapes of the probes, which are the last inputs.

    For each call, in the order of `look.calls()`, the graph then returns its table and its samples, behind all else.
    """
    graph = module.graph
    probes: list[tuple[int, int]] = []
    more: list[fx.Node] = []

    def probe(shape: tuple[int, int]) -> fx.Node:
        last = graph.find_nodes(op="placeholder")
        with graph.inserting_after(last[-1]):
            node = graph.placeholder(f"attemper_probe_{len(probes)}")
        probes.append(shape)
        return node

    for count, seen in enumerate(look.found):
        name = f"attemper_{traced_sources()}_{seen.heads}_{seen.entries}_{count}"
        module.add_submodule(name, ReadCall(seen.heads, seen.entries))
        node, own = seen.node, {}
        for what, shape in seen.probes().items():
            own[f"{what}_probe"] = probe(shape)
        with graph.inserting_before(node):
            both = graph.call_module(name, node.args, {**node.kwargs, **own})
            output, table = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
            samples = [graph.call_function(_sample, (kept, seen.batched)) for kept in seen.samples.values()]
        output.meta.update(node.meta)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
        more += [table, *samples]
    for count, (body, node, inner) in enumerate(look.bodies):
        returned = len(_outputs(body))
        shapes = install(body, inner)
        within = "_".join(f"{seen.heads}_{seen.entries}" for seen in inner.calls())
        name = f"attemper_body_{traced_sources()}_{within}_{count}"
        module.add_submodule(name, body)
        with graph.inserting_before(node):
            attribute = graph.get_attr(name)
        node.args = (attribute, *node.args[1:], *(probe(shape) for shape in shapes))
        with graph.inserting_after(node):
            places = range(returned, len(_outputs(body)))
            more += [graph.call_function(operator.getitem, (node, place)) for place in places]
    last = graph.output_node()
    last.args = ((*_outputs(module), *more),)
    graph.lint()
    module.recompile()
    return probes


@functools.cache
def traced_sources() -> str:
    """A digest of what a compiler finds when it follows a `ReadCall`.

    It keeps what it compiled on disk, and finds it again by the names in a graph, not by what is behind them: so
    whatever a `ReadCall` depends on has to be in its name.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in (package, package / "_watch", package / "_backends" / "_operator"):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph in a module of its own, to be changed or to be kept as it was."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, nodes))
    again = fx.GraphModule(module, graph)
    again.meta = module.meta
    return again


def _outputs(module: fx.GraphModule) -> tuple[Any, ...]:
    return tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _sample(x: Tensor, batched: bool) -> Tensor:
    """Enough of a tensor to tell a factor from."""
    return (x.detach()[:1] if batched else x.detach()).clone()
