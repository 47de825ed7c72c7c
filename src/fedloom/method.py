"""Method: one paper in one file. Its settings, its phases (what runs at a client), and `run` (the algorithm, top to bottom)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import operator
import pkgutil
import re
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from fedloom import learn, models, task
from fedloom.errors import ConfigError, MessageError, unknown
from fedloom.message import DTYPES, Message, Schema, schema_of

if TYPE_CHECKING:
    from fedloom.graph import Federation
    from fedloom.party import Client, Facts, Server

F = TypeVar("F", bound=Callable[..., Any])


# ---- settings ----
def setting(
    default: Any, help: str, *, at_least: float | None = None, above: float | None = None,
    at_most: float | None = None, below: float | None = None, choices: tuple[str, ...] | None = None,
    task: str | None = None, tune: str | None = None,
) -> Any:  # fmt: skip
    """A field of a method: its default, what it is (with the paper's symbol), the values it may take, and the only task it is for.

    tune: what `fedloom tune` looks through, "low..high" (logarithmically if it spans two decades or more) or "a,b,c".
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    return field(default=default, metadata={"help": help, "bounds": bounds, "choices": choices, "task": task, "tune": tune})


_COMPARE = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def _type_of(f: Any) -> str:
    return f.type if isinstance(f.type, str) else f.type.__name__


def valid_values(f: Any) -> str:
    """What a field may be, in words, for help texts and errors."""
    if f.metadata.get("choices"):
        return " or ".join(f.metadata["choices"])
    bounds = " and ".join(f"{word} {b:g}" for word, b in f.metadata.get("bounds", {}).items() if b is not None)
    kind = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(_type_of(f), _type_of(f))
    return f"{kind} {bounds}".strip()


def check_setting(f: Any, value: Any, where: str) -> Any:
    """Gives `value` as the field's type (a whole number may stand for a float), or raises a ConfigError naming the field."""
    ok: bool = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }.get(_type_of(f), True)
    choices = f.metadata.get("choices")
    if ok and choices:
        ok = value in choices
    if ok:
        bounds = {word: bound for word, bound in f.metadata.get("bounds", {}).items() if bound is not None}
        ok = all(_COMPARE[word](value, bound) for word, bound in bounds.items())
    if not ok:
        raise ConfigError(f"{where}.{f.name} is {value!r}, must be {valid_values(f)}")
    return float(value) if _type_of(f) == "float" else value


# ---- phases ----
def phase(**reply: str) -> Callable[[F], F]:
    """Marks a client-side function `(self, client, **message) -> message` and declares what it answers, tensor by tensor.

    A declaration is "=name" (the same names, shapes and dtypes as what was sent under `name`), "weights" (those of the client's
    model), "weights:field" (those of the model that the method's setting `field` names), "factors:field" (the same, any matrix whole or
    as the product of a thin `left` and `right`), or "dtype[dims]" with dims from C (classes), d (features), K (clients), p (embedding
    width), a whole number, an int field of the method, #name (the number that was sent under `name`), *name (how many are true in the
    answer's own bool tensor `name`), or n (any length; the method must then say in `discloses` what that tells the server). The dtype may
    be ":field", a text field of the method whose choices are dtypes. Whatever does not fit is refused at the waist, in every engine.
    """
    for name, declared in reply.items():
        if not _OF_MODEL.fullmatch(declared) and not declared.startswith("=") and not _TENSOR.fullmatch(declared):
            valid = "'=name', 'weights', 'weights:field', 'factors:field' or 'dtype[dims]'"
            raise ValueError(f"phase: {name}={declared!r} is none of {valid}")
        for counted in re.findall(r"\*([^,\]]*)", declared):
            if not reply.get(counted, "").startswith("bool["):
                raise ValueError(f"phase: {name}={declared!r} counts what is true in {counted!r}, which has to be declared as 'bool[dims]'")

    def mark(function: F) -> F:
        function.reply = reply  # type: ignore[attr-defined]
        function.sized_by_reply = any("*" in d or d.startswith("factors") for d in reply.values())  # type: ignore[attr-defined]
        signature = inspect.signature(function).parameters
        if "secure" in signature:
            raise ValueError(f"phase: {function.__name__!r} cannot take a tensor called 'secure': secure sums use that name")
        function.takes = tuple(signature)[2:]  # type: ignore[attr-defined]
        function.needs = frozenset(n for n in tuple(signature)[2:] if signature[n].default is inspect.Parameter.empty)  # type: ignore[attr-defined]
        return function

    return mark


def summed(function: F) -> F:
    """Marks a phase of whose replies the server needs nothing but the sum: `server.sum(phase)`. A secure run gives it nothing else."""
    function.aggregate, function.by = "sum", None  # type: ignore[attr-defined]
    return function


def averaged(by: str | None = None) -> Callable[[F], F]:
    """Marks a phase of whose replies the server needs nothing but the mean: `server.mean(phase)`. A secure run gives it nothing else.

    by: name of a phase that answers the client's weight, one number, asked once and then kept; none = all clients count alike.
    """

    def mark(function: F) -> F:
        function.aggregate, function.by = "mean", by  # type: ignore[attr-defined]
        return function

    return mark


def letters(read_by: str, sealed: bool = True) -> Callable[[F], F]:
    """Marks a phase that writes to other clients: it answers {receiver: letter}, and what it declares is what is in a letter.

    `server.relay(phase)` hands every client the letters to it in the phase `read_by`, as `letters` = {sender: letter}. In a secure run
    they are sealed, so that the server carries what it cannot read; sealed = False is for what is encrypted, or public, already.
    Its reader checks a letter, and knows what the phase declares but not what its writer was sent: no "=name", "weights", "#name", "*name".
    """

    def mark(function: F) -> F:
        for name, declared in function.reply.items():  # type: ignore[attr-defined]
            if _OF_MODEL.fullmatch(declared) or declared.startswith("=") or "#" in declared or "*" in declared:
                raise ValueError(f"letters: {name}={declared!r} depends on what a letter's reader does not know; declare 'dtype[dims]'")
        function.read_by, function.sealed = read_by, sealed  # type: ignore[attr-defined]
        return function

    return mark


_OF_MODEL = re.compile(r"weights|(?P<form>weights|factors):(?P<field>\w+)")
_TENSOR = re.compile(r"(?P<dtype>" + "|".join(DTYPES) + r"|:(?P<field>\w+))\[(?P<dims>[\w#*, ]*)\]")


def expected_letters(method: Method, phase: Any, message: Message, reply: Message, facts: Facts, sender: str) -> Schema:
    """The schema of a client's letters: to whom it writes is its own affair, what a letter holds is declared."""
    content = expected_reply(method, phase, message, (), facts)
    for receiver in reply:
        if receiver not in facts.clients or receiver == sender:
            others = ", ".join(c for c in facts.clients if c != sender)
            who = f"client {sender!r} in {phase.__name__!r}"
            raise MessageError(f"{who}: writes to {receiver!r}, who is not another client; valid: {others}")
    return tuple(sorted((f"{receiver}/{name}", dtype, shape) for receiver in reply for name, dtype, shape in content))


def expected_reply(method: Method, phase: Any, message: Message, model: Schema, facts: Facts, reply: Message | None = None) -> Schema:
    """The schema a client's answer to `message` must have. model: the schema of its model weights. reply: the answer, if known."""
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    for name, declared in phase.reply.items():
        if of_model := _OF_MODEL.fullmatch(declared):
            known = model if of_model["field"] is None else model_schema(getattr(method, of_model["field"]), facts)
            given = (reply or {}).get(name) if of_model["form"] == "factors" else None
            rows += [(f"{name}/{inner}", dtype, shape) for inner, dtype, shape in _in_factors(known, given)]
        elif declared.startswith("="):
            rows += [(name + inner[len("x") :], dtype, shape) for inner, dtype, shape in schema_of({"x": message[declared[1:]]})]
        else:
            match = _TENSOR.fullmatch(declared)
            assert match is not None
            dims = [d.strip() for d in match["dims"].split(",") if d.strip()]
            dtype = str(getattr(method, match["field"])) if match["field"] else match["dtype"]
            rows.append((name, dtype, tuple(_length(method, d, message, facts, reply) for d in dims)))
    return tuple(sorted(rows))


@lru_cache(maxsize=64)
def model_schema(spec: str, facts: Facts) -> Schema:
    """The schema of the weights that a model of that name has in this federation."""
    return weights_schema(facts.build(spec, "server"))


def _in_factors(known: Schema, given: Any) -> Schema:
    """The schema of weights of which some matrices [m, n] came as [m, r] and [r, n]; never more numbers than the matrix has."""
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in known:
        came = given.get(name) if isinstance(given, dict) else None
        if isinstance(came, dict) and len(shape) == 2:
            left = came.get("left")
            rank = left.shape[1] if isinstance(left, torch.Tensor) and left.dim() == 2 else 0
            rank = min(rank, math.prod(shape) // sum(shape))
            rows += [(f"{name}/left", dtype, (shape[0], rank)), (f"{name}/right", dtype, (rank, shape[1]))]
        else:
            rows.append((name, dtype, shape))
    return tuple(sorted(rows))


def _length(method: Method, dim: str, message: Message, facts: Facts, reply: Message | None) -> int:
    if dim.startswith("#"):
        return int(message[dim[1:]])
    if dim.startswith("*"):
        counted = None if reply is None else reply.get(dim[1:])
        if isinstance(counted, torch.Tensor) and counted.dtype == torch.bool:
            return int(counted.sum())
        return -1  # what is not there, or is no bool, is refused by its own name
    known = {"C": facts.num_classes, "d": facts.num_features, "K": facts.num_clients, "p": facts.width, "n": -1}
    if dim.isdigit():
        return int(dim)
    return known[dim] if dim in known else int(getattr(method, dim))


def require_names(phase: Any, message: Message, who: str) -> None:
    """A phase's parameters are its schema: raises MessageError if a name is missing or not one of them."""
    for name in sorted(phase.needs - message.keys()):
        raise MessageError(f"{who}: tensor {name!r} is missing in the message to {phase.__name__!r}")
    for name in sorted(message.keys() - set(phase.takes)):
        valid = ", ".join(phase.takes) or "nothing"
        raise MessageError(f"{who}: {phase.__name__!r} does not take {name!r}; valid: {valid}")


# ---- methods ----
@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods. Fields are the paper's hyper-parameters; constructors check and store, nothing else."""

    rounds: int = setting(100, "communication rounds", at_least=1)

    # How the result may be measured; the first is the default. "local": each client's own model after its local training;
    # "global": the server's model as the client downloads it; "common": the one model that everybody shares.
    evaluations: ClassVar[tuple[str, ...]] = ("local",)
    one_model: ClassVar[bool] = False  # needs the same architecture at every client
    pooled: ClassVar[bool] = False  # sees all graphs in one place: the baseline that federating tries to reach
    crosses: ClassVar[bool] = False  # works on the edges between clients, which each end's owner must know
    transductive: ClassVar[bool] = False  # has to see all nodes before training, those to be predicted too (never their labels)
    tasks: ClassVar[tuple[str, ...]] = ("node", "graph")
    validates: ClassVar[bool] = False  # whether clients choose between models by their validation items (never: train on them)
    minimum: ClassVar[int] = 1  # fewest answers to an exchange that it can go on with, whatever the quorum
    everybody: ClassVar[tuple[str, ...]] = ()  # phases that nobody may be absent from, whatever the quorum
    discloses: ClassVar[str] = ""  # what the server learns that is as large as a client's data, if anything
    tells: ClassVar[str] = ""  # what other clients learn of a client's features and labels, other than by the model, if anything

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_setting(f, getattr(self, f.name), "method"))

    def check(self, facts: Facts) -> None:  # noqa: B027  (most methods work with all that the class attributes above let through)
        """Raises a ConfigError if the method cannot work with these models and sizes."""

    @abstractmethod
    def run(self, server: Server) -> None:
        """The algorithm, from top to bottom. It asks for the phases it needs, `setup` among them."""

    @phase(size="int64[]")
    def size(self, client: Client) -> Message:
        """n_k, the number of the client's items: what `@averaged(by="size")` weighs by."""
        return {"size": torch.tensor(max(1, client.graph.num_items))}  # an inductive client may have nothing to train on

    @phase(val="int64[C,C]", test="int64[C,C]", auc="float32[2]")
    def evaluate(self, client: Client, model: Message | None = None) -> Message:
        """Confusion matrices (and AUCs) of the client's model, or of `model` if one is sent, on its own held-out items."""
        graph = client.full_graph
        with torch.no_grad():
            logits = self.predict(client, model)
        areas = [task.auc(logits, graph.y, mask) if client.facts.auc else task.UNDEFINED for mask in (graph.val, graph.test)]
        val, test = task.held_out(logits, graph)
        return {"val": val, "test": test, "auc": torch.tensor(areas)}

    @summed
    @phase(scores="float64[6,4]")
    def evaluate_sum(self, client: Client, model: Message | None = None) -> Message:
        """The same for a secure run, in which the server gets no client's scores but their sums; see `task.scores_to_add`."""
        reply = self.evaluate(client, model)
        return {"scores": task.scores_to_add(reply["val"], reply["test"], reply["auc"], client.full_graph.num_items)}

    def predict(self, client: Client, model: Message | None) -> torch.Tensor:
        """Logits for all items of the client's full graph, noise off: from its own model, or from the given weights."""
        net = client.state["model"]
        if model is None:
            return net(client.full_graph)
        return models.applied(net, client.full_graph, model)

    def exhibits(self, client: Client) -> Message:
        """What a client has to show of itself after a completed run, for pictures: small tensors, whatever the size of its graph.

        It is no message: it crosses no waist, no server sees it, and it must not draw from a stream that training uses. A simulation,
        in which one machine holds everything anyway, keeps it in the run folder, which then tells as much of a client's graph as is in
        the pictures, also of a secure run; a party of a deployment shows nothing to anybody.
        """
        return {}

    def exhibits_of_all(self, federation: Federation) -> Message:
        """The same of all clients together, where one process holds their graphs: what none of them can know alone."""
        return {}

    @classmethod
    def shares_width(cls) -> bool:
        """Whether the clients' embeddings must be equally wide: some phase answers with a tensor that is p wide."""
        declared = [d for _, f in inspect.getmembers(cls, inspect.isfunction) for d in getattr(f, "reply", {}).values()]
        return any(match and "p" in re.split(r"[ ,]+", match["dims"]) for match in map(_TENSOR.fullmatch, declared))

    def settings(self) -> dict[str, Any]:
        """The fields as a plain dict: what a TOML file would say."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Plugin(ABC):
    """Base of what comes in front of a method: it prepares the clients, then the method of its setting `base` runs, unchanged.

    The class that runs is both at once (`in_front_of`): it has the settings and the phases of both, and no name may mean two things.
    """

    base: str = setting("fedavg", "the method that trains: a name (see `fedloom methods`) or a file")

    # As in Method: what is true of either is true of both.
    tasks: ClassVar[tuple[str, ...]] = ("node", "graph")
    crosses: ClassVar[bool] = False
    transductive: ClassVar[bool] = False
    validates: ClassVar[bool] = False
    everybody: ClassVar[tuple[str, ...]] = ()
    discloses: ClassVar[str] = ""
    tells: ClassVar[str] = ""

    @abstractmethod
    def prepare_clients(self, server: Server) -> None:
        """What is done once, before the method that follows sets anything up."""

    def run(self, server: Server) -> None:
        """The plug-in's part, then the method's."""
        self.prepare_clients(server)
        super().run(server)  # type: ignore[misc]  # the method's: it is next in the class's line of parents


@lru_cache(maxsize=256)
def in_front_of(plugin: type[Plugin], method: type[Method], name: str) -> type[Method]:
    """The class of a method, found by that name, with a plug-in in front of it."""
    if issubclass(method, Plugin):
        raise ConfigError(f"method.base is {name!r}, which itself comes in front of a method; give that method")
    if method.pooled:
        raise ConfigError(f"method.base is {name!r}, which sees all graphs in one place: there are no clients to prepare")
    if not (tasks := tuple(t for t in plugin.tasks if t in method.tasks)):
        raise ConfigError(f"method.base is {name!r}, which does {' and '.join(method.tasks)} tasks, not {' or '.join(plugin.tasks)} ones")
    either, both = ("crosses", "transductive", "validates"), ("discloses", "tells")
    shared = {"run", "check", "tasks", "everybody", "exhibits", "exhibits_of_all", *either, *both}  # what calls, or joins, both
    names = {key for key in (*dir(plugin), *(f.name for f in fields(plugin))) if not key.startswith(("__", "_abc_"))}
    for key in sorted(names & {*dir(method), *(f.name for f in fields(method))} - shared):
        raise ConfigError(f"method.base is {name!r}: its {key!r} and that of {plugin.__name__} are two things of one name; rename one")
    joined: dict[str, Any] = {"__module__": plugin.__module__, "__doc__": plugin.__doc__, "tasks": tasks}
    joined["everybody"] = (*plugin.everybody, *method.everybody)
    joined |= {key: getattr(plugin, key) or getattr(method, key) for key in either}
    joined |= {key: "; ".join(filter(None, (getattr(plugin, key), getattr(method, key)))) for key in both}
    return dataclass(frozen=True)(type(f"{plugin.__name__}{method.__name__}", (plugin, method), joined))


# ---- finding methods by file name ----
def method_names() -> dict[str, str]:
    """{name: module} of every method file that comes with fedloom; a file "_name.py" holds what several methods share."""
    import fedloom.methods

    return {_shown(m.name): m.name for m in pkgutil.iter_modules(fedloom.methods.__path__) if not m.name.startswith("_")}


def _shown(module: str) -> str:
    return module.replace("_plus", "+").replace("_", "-")


def method_class(name: str, settings: Mapping[str, Any] = types.MappingProxyType({})) -> type[Method]:
    """The class of a method: by its file's name ("fedavg"), or from a user's own file ("path/to/mine.py").

    settings: what the method is to be made with; of a plug-in, they say what it is in front of.
    """
    if name.endswith(".py"):
        module = _import_file(Path(name))
    else:
        known = method_names()
        if name.lower() not in known:
            raise unknown("method", name, known)
        module = importlib.import_module(f"fedloom.methods.{known[name.lower()]}")
    defined = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    own = [c for c in defined if issubclass(c, (Method, Plugin))]
    if len(own) != 1:
        raise ConfigError(f"method: {name} must define exactly one subclass of Method or Plugin, found {len(own)}")
    (found,) = own
    if issubclass(found, Method):
        return found
    (base,) = (f for f in fields(found) if f.name == "base")
    after = check_setting(base, settings.get("base", base.default), "method")
    return in_front_of(found, method_class(after), after)


def _import_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ConfigError(f"method: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"fedloom_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and inspect look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"method: {str(path)!r} cannot be imported ({type(error).__name__}: {error})") from error
    return module


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """A method by name with the given settings; a misspelt one is an error that names the nearest and all valid ones."""
    cls = method_class(name, settings)
    valid = [f.name for f in fields(cls)]
    for key in settings:
        if key not in valid:
            raise unknown(f"setting of method {name!r}:", key, valid)
    return cls(**settings)


def default_of(f: Any) -> Any:
    """A dataclass field's default."""
    return f.default if f.default is not MISSING else f.default_factory()


def weights_schema(model: torch.nn.Module) -> Schema:
    """The schema of a model's weights as they travel."""
    return schema_of(learn.weights(model))
