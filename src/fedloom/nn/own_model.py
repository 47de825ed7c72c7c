"""A user's own torch module as a model.

Any module works whose forward takes `x, edge_index` and returns a row of logits per node; PyG's
models do. It may also take `edge_weight` and `batch`. In a graph task a row per node is averaged
over each graph, and a row per graph is used as it is.

A module has the split that some methods need if it defines

    embed(x, edge_index)   # returns embeddings, [nodes or graphs, width]
    head                   # a module: head(z) or head(z, edge_index) returns the logits

and its forward returns head(embed(x, edge_index)). Without a split, the logits stand for the
embedding.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from fedloom._system import import_file
from fedloom.data.graph import Graph, Task
from fedloom.errors import ConfigError
from fedloom.nn.layers import Noise
from fedloom.nn.model import Model, pooling_matrix

# A module's class, a function (num_features, num_classes) -> module, or a module to copy.
Source: TypeAlias = type[nn.Module] | Callable[[int, int], nn.Module] | nn.Module
# What a constructor's arguments are called that fedloom can fill in.
_FEATURES = ("in_channels", "num_features", "in_features", "input_dim", "in_dim", "nfeat")
_CLASSES = ("out_channels", "num_classes", "out_features", "output_dim", "out_dim", "nclass")
_HINT = "see docs/own-model.md"


class OwnSpec(str):
    """The name of a user's model in a run, and the module behind it.

    It is a text, so that it stands wherever a model's spec does. Two specs are equal if their
    texts and their sources are.
    """

    source: Source
    digest: str

    def __new__(cls, text: str, source: Source) -> OwnSpec:
        """Returns the spec of a module with that name."""
        spec = super().__new__(cls, text)
        spec.source, spec.digest = source, _digest(source)
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnSpec, (str(self), self.source)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other)) and self.digest == getattr(other, "digest", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), self.digest))


def is_own(spec: str) -> bool:
    """Returns whether a spec names a user's model: `file.py`, `file.py:Class`, or an OwnSpec."""
    return isinstance(spec, OwnSpec) or spec.partition(":")[0].endswith(".py")


def own_spec(source: str | Source, folder: Path | None = None) -> OwnSpec:
    """Returns the spec of a user's model.

    Args:
        source: `file.py:Class`, or `file.py` with one module class; a class; a function
            (num_features, num_classes) -> module; or a module, which every client copies.
        folder: Where the file is, if its path is relative. None: the working directory; the name
            of the model then has the whole path.
    """
    if isinstance(source, OwnSpec):
        return source
    if isinstance(source, str):
        path, colon, name = source.partition(":")
        text = source if folder is not None else f"{Path(path).resolve()}{colon}{name}"
        return OwnSpec(text, _from_file(source, folder or Path()))
    if not callable(source):
        raise ConfigError(
            f"model is {source!r}; valid: a name (`fedloom models`), a torch.nn.Module, its class, "
            "a function (num_features, num_classes) -> module, or 'file.py:Class'"
        )
    named = type(source) if isinstance(source, nn.Module) else source
    return OwnSpec(getattr(named, "__name__", type(named).__name__), source)


def _from_file(text: str, folder: Path) -> Source:
    path, _, name = text.partition(":")
    module = import_file(folder / path, "model")
    defined = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    }
    if name:
        found = getattr(module, name, None)
        if not callable(found):
            raise ConfigError(
                f"model {text!r}: {path} defines no {name!r}; module classes there: "
                f"{', '.join(sorted(defined)) or 'none'}"
            )
        chosen: Source = found
        return chosen
    if len(defined) != 1:
        raise ConfigError(
            f"model {text!r}: name one of its module classes, '{path}:CLASS'; there: "
            f"{', '.join(sorted(defined)) or 'none'}"
        )
    return next(iter(defined.values()))


def _digest(source: Source) -> str:
    """Returns a digest of a module's code, and of the weights of a module to copy."""
    digest = hashlib.sha256()
    if isinstance(source, nn.Module):
        for name, tensor in source.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    try:
        target: Any = type(source) if isinstance(source, nn.Module) else source
        digest.update(inspect.getsource(target).encode())
    except (OSError, TypeError):  # defined at a prompt: there is no source to read
        digest.update(str(id(source)).encode())
    return digest.hexdigest()[:12]


class OwnModel(Model):
    """A user's module behind the interface of `Model`."""

    def __init__(self, spec: OwnSpec, module: nn.Module, num_classes: int, task: Task):
        super().__init__()
        self.task = task
        self.dropout = 0.0  # the module has its own
        self.form = f"{spec} {spec.digest} {num_classes} {task}"
        self.split = has_split(module)
        if self.split:
            # Registered before the module, so that the names of the head's parameters start with
            # "classifier.". The module refers to the same parameters.
            self.classifier = module.head  # type: ignore[assignment]
        self.module = module
        self._arguments = _optional(module.forward)
        self._of_embed = _optional(module.embed) if self.split else frozenset()  # type: ignore[arg-type]
        head_takes = _parameters(self.classifier.forward) if self.split else {}
        self.linear = len(head_takes) < 2 or task == "graph"
        self.width = num_classes

    def items(self, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the module's embeddings, or its logits if it has no split."""
        call = self.module.embed if self.split else self.module
        with self._mode(rng):
            out = call(  # type: ignore[operator]
                graph.x,
                graph.edge_index,
                **self._extras(graph, self._of_embed if self.split else self._arguments),
            )
        if self.task == "graph" and len(out) == graph.num_nodes != graph.num_items:
            out = pooling_matrix(graph, "mean") @ out
        return out

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """Returns the output of the module's head; without a split, the embedding itself."""
        if not self.split:
            return z
        with self._mode(rng):
            out: Tensor = (
                self.classifier(z) if self.linear else self.classifier(z, graph.edge_index)
            )
        return out

    def _extras(self, graph: Graph, takes: frozenset[str]) -> dict[str, Tensor | None]:
        known = {"edge_weight": graph.edge_weight, "batch": graph.batch}
        return {name: value for name, value in known.items() if name in takes and value is not None}

    @contextmanager
    def _mode(self, rng: Noise | None) -> Iterator[None]:
        """Inside the block, dropout is on if and only if `rng` is given, and draws from it."""
        self.module.train(rng is not None)
        assert rng is None or isinstance(rng, Generator), "own models run one client at a time"
        with nullcontext() if rng is None else _seeded(rng):
            yield


@contextmanager
def _seeded(rng: Generator) -> Iterator[None]:
    """Inside the block, torch's global random state comes from `rng`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
        yield


def has_split(module: nn.Module) -> bool:
    """Returns whether a module defines `embed` and a module `head`."""
    return callable(getattr(module, "embed", None)) and isinstance(
        getattr(module, "head", None), nn.Module
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function).parameters.items()
    return {
        name: p
        for name, p in signature
        if p.kind in kinds and (p.default is p.empty or name == "edge_index")
    }


def _optional(function: Callable[..., Any]) -> frozenset[str]:
    """Returns which of `edge_weight` and `batch` a function takes."""
    return frozenset(inspect.signature(function).parameters) & {"edge_weight", "batch"}


def build_own(
    spec: OwnSpec, num_features: int, num_classes: int, task: Task, dropout: float, seed: int
) -> OwnModel:
    """Returns a new model of a user's module, checked on a small graph.

    A class or function draws its parameters under the seed. A module is copied with the parameters
    that it has.
    """
    rng = Generator().manual_seed(seed)
    module = _built(spec, num_features, num_classes, dropout, rng)
    probe = _probe(num_features, num_classes, task)
    model = OwnModel(spec, module, num_classes, task)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad():
            # With dropout first. This also materialises lazy parameters.
            noise = Generator().manual_seed(0)
            model.logits(model.items(probe, noise), probe, noise)
            z = model.items(probe, None)
            logits = model.logits(z, probe, None)
            direct = module(probe.x, probe.edge_index, **model._extras(probe, model._arguments))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {spec!r}: forward(x, edge_index) fails on a graph of 5 nodes with "
            f"{num_features} features ({type(error).__name__}: {error}); {_HINT}"
        ) from error
    _require(spec, model, probe, z, logits, direct)
    _require_constant_buffers(spec, module, before)
    if before and not isinstance(spec.source, nn.Module):
        again = _built(spec, num_features, num_classes, dropout, Generator().manual_seed(seed + 1))
        _require_constant_buffers(spec, again, before)
    model.width = z.shape[1]
    return model


def _built(
    spec: OwnSpec, num_features: int, num_classes: int, dropout: float, rng: Generator
) -> nn.Module:
    if isinstance(spec.source, nn.Module):
        return copy.deepcopy(spec.source)
    try:
        with _seeded(rng):
            module = _call(spec.source, num_features, num_classes, dropout)
    except Exception as error:
        raise ConfigError(
            f"model {spec!r}: cannot be built for {num_features} features and {num_classes} "
            f"classes ({type(error).__name__}: {error}); pass a function, such as "
            f"lambda num_features, num_classes: {spec}(...)"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model {spec!r}: must give a torch.nn.Module, gave a {type(module).__name__}"
        )
    return module


def _call(source: Any, num_features: int, num_classes: int, dropout: float) -> Any:
    """Calls a constructor by the names of its arguments, or with features and classes."""
    takes = inspect.signature(source).parameters
    inputs = next((name for name in _FEATURES if name in takes), None)
    outputs = next((name for name in _CLASSES if name in takes), None)
    if inputs is None or outputs is None:
        return source(num_features, num_classes)
    # Arguments of PyG's models that have no default, and fedloom's own defaults for them.
    defaults: dict[str, float] = {"hidden_channels": 64, "num_layers": 2}
    more = {name: value for name, value in defaults.items() if name in takes}
    more = {name: v for name, v in more.items() if takes[name].default is inspect.Parameter.empty}
    if "dropout" in takes:
        more["dropout"] = dropout
    return source(**{inputs: num_features, outputs: num_classes}, **more)


def _probe(num_features: int, num_classes: int, task: Task) -> Graph:
    """Returns a graph of 5 nodes; in a graph task, two graphs of 3 and 2 nodes."""
    edges = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
    x = torch.rand(5, num_features, generator=Generator().manual_seed(0))
    if task == "node":
        return Graph(x, edges, torch.zeros(5, dtype=torch.int64), num_classes)
    batch = torch.tensor([0, 0, 0, 1, 1])
    return Graph(x, edges, torch.zeros(2, dtype=torch.int64), num_classes, batch=batch)


def _require(
    spec: OwnSpec, model: OwnModel, probe: Graph, z: Tensor, logits: Tensor, direct: Tensor
) -> None:
    """Raises a ConfigError that says what a module lacks.

    Args:
        spec: The module's spec.
        model: The model around it.
        probe: A small graph.
        z: Its embeddings.
        logits: The logits by way of the embeddings.
        direct: What the module's forward returns.
    """
    where, wanted = f"model {spec!r}", (probe.num_items, probe.num_classes)
    if tuple(logits.shape) != wanted:
        items = "nodes" if model.task == "node" else "graphs"
        raise ConfigError(
            f"{where}: forward returns {list(logits.shape)} for {wanted[0]} {items} and "
            f"{wanted[1]} classes, must return {list(wanted)}; {_HINT}"
        )
    if model.task == "graph" and len(direct) != len(logits):
        direct = pooling_matrix(probe, "mean") @ direct
    if model.split and not torch.allclose(direct, logits, atol=1e-5):
        raise ConfigError(f"{where}: forward must return head(embed(x, edge_index)); {_HINT}")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(f"{where}: has no parameters to train")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(f"{where}: parameter {name!r} is {parameter.dtype}, must be float32")


def _require_constant_buffers(
    spec: OwnSpec, module: nn.Module, before: Mapping[str, Tensor]
) -> None:
    """Raises a ConfigError if a buffer differs from what it was, or is new."""
    for name, buffer in module.named_buffers():
        if name not in before or not torch.equal(before[name], buffer):
            raise ConfigError(
                f"model {spec!r}: buffer {name!r} changes in training or is random. Buffers do not "
                "travel: running statistics, as of BatchNorm, are private data. Use LayerNorm, "
                "track_running_stats=False, or a parameter"
            )
