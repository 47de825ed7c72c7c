"""Client: one party's side, and all that a phase may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.core.aggregation import PlainResponder, Responder
from fedloom.core.class_weight import explicit_weights
from fedloom.core.facts import Facts
from fedloom.core.filters import parse_filters
from fedloom.core.history_hash import EMPTY, chained
from fedloom.core.message import Message, flatten, isolate, tree_map, unflatten
from fedloom.core.method import OWN_LOGITS, Method
from fedloom.core.phase import BoundPhase, phases_of, said
from fedloom.core.state import restore, snapshot
from fedloom.data.federation import PartySize
from fedloom.data.graph import Graph
from fedloom.data.randomised_edges import randomised_edges
from fedloom.data.seeds import entropy_noise, stream_seed
from fedloom.nn.losses import training_loss
from fedloom.nn.metrics import UNDEFINED
from fedloom.nn.model import Model

# What upload filters have lost, {phase: tensors}. No method uses this name for its own state.
LOST = "lost by upload filters"
# The mean loss of the last training that no evaluation has reported. As above.
LOSS = "training loss"


class Client:
    """A party's graph, its state and its own random streams.

    Attributes:
        name: The client's name.
        facts: What every party knows.
        graph: What training may see. Labels outside the training set are -1; in an inductive
            federation the other items are absent. With `run.edge_epsilon` its edges are those of
            randomised response.
        full_graph: Everything that the client holds, for evaluation.
        state: What checkpoints keep: tensors, models and optimisers, by name.
        memory: What a phase keeps for a later one. It is not saved. A resumed run repeats what
            comes before the rounds, and that must rebuild it.
        class_weight: The weights of classes in the training loss, [classes]. None: all are equal.
        kept: What predicted in the best evaluation of each stage (`Method.predictor`), by stage.
            Checkpoints keep it.
        deployed: Whether the client is a party of its own in a deployment. Then it remembers the
            shared model that it scored last, and `secret_normal` draws from the operating system.
            In a simulation the engine has the model, once for all clients.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        facts: Facts,
        inductive: bool = False,
        responder: Responder | None = None,
    ):
        if facts.secure is not None and responder is None:
            raise ValueError("a client of a secure run needs the responder of fedloom.privacy")
        self.name, self.facts = name, facts
        self.full_graph, self.inductive = graph, inductive
        self.graph = graph.training_view(inductive)
        if facts.edge_epsilon:
            seeded = torch.Generator().manual_seed(stream_seed(facts.seed, "client", name, "edges"))
            drawn = seeded if facts.edges_seeded else None
            self.graph = randomised_edges(self.graph, facts.edge_epsilon, drawn)
        self.state: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.streams: dict[str, torch.Generator] = {}
        self.kept: dict[str, Message] = {}
        self.deployed = False
        self._scored: tuple[Message | None, Tensor | None] = (None, None)  # shared model, logits
        self._responder = responder or PlainResponder()
        self._upload = parse_filters(facts.upload, "run.upload")
        self._download = parse_filters(facts.download, "run.download")
        self._batches: tuple[Graph | None, int, list[Graph]] = (None, 0, [])
        self.class_weight: Tensor | None = explicit_weights(facts.class_weight, facts.num_classes)
        self._losses: list[Tensor] = []  # of the steps in the current phase
        self._last: tuple[bytes, Message] = (b"", {})  # the last order, if it `runs_once`

    def perform(self, method: Method, phase: str, message: Message) -> Message:
        """Runs a phase. Every engine calls this, wherever the client is."""
        declared, order = phases_of(type(method)).get(phase), b""
        if declared is not None and declared.runs_once:
            order = chained(EMPTY, 0, phase, {self.name: message}, {})
            if order == self._last[0]:
                return self._last[1]
        self._losses = []
        reply = self._answer(method, phase, message)
        self._last = (order, reply if order else {})
        if self._losses:
            values = [float(loss) for loss in self._losses]
            self.state[LOSS] = torch.tensor(sum(values) / len(values))
        return reply

    def _answer(self, method: Method, phase: str, message: Message) -> Message:
        message = self._download.decode(message)
        if not self._upload:
            return self._responder.answer(method, self, phase, message)
        sent = flatten(isolate(message))  # the phase may write to its message
        reply = self._responder.answer(method, self, phase, message)
        lost = self.state.setdefault(LOST, {})
        bound: BoundPhase = getattr(method, phase)
        encoded, left = self._upload.encode_reply(
            bound.phase, reply, sent, flatten(lost.get(phase, {}))
        )
        lost[phase] = unflatten(left)
        return encoded

    def said(self) -> dict[str, int]:
        """Returns what the client says about its size at the start of a run."""
        return said(PartySize.of(self.name, self.full_graph), self.inductive)

    def note_scored(self, method: Method, model: Message | None, logits: Tensor) -> None:
        """Remembers what `predictor` will need of this evaluation.

        Args:
            method: The method.
            model: The shared model that was scored. None: the client's own.
            logits: The logits of the client's items.
        """
        self._scored = (
            model if self.deployed else None,
            logits.detach() if method.keeps_logits else None,
        )

    def predictor(self, method: Method, shared: Message | None = None) -> Message:
        """Returns what predicts as in the last evaluation, without copying it.

        Args:
            method: The method.
            shared: The shared model that was scored. None: the client's own, or the one that the
                client remembers.
        """
        own, replaced = self._parts(method, shared)
        return {**own, **replaced}

    def keep(self, method: Method, stage: str, shared: Message | None = None) -> None:
        """Keeps `predictor` as the best of a stage: a copy, but for the tensors of `shared`.

        Many clients can keep the same shared model.
        """
        own, replaced = self._parts(method, shared)
        self.kept[stage] = {**tree_map(_copy, own), **replaced}

    def _parts(self, method: Method, shared: Message | None) -> tuple[Message, Message]:
        """Returns the client's own part of `predictor`, and that of the shared model."""
        remembered, logits = self._scored
        shared = remembered if shared is None else shared
        replaced = {} if shared is None else method.shared_predictor(shared)
        own = {name: t for name, t in method.predictor(self).items() if name not in replaced}
        return own if logits is None else {**own, OWN_LOGITS: logits}, replaced

    def build(self, purpose: str = "init") -> Model:
        """Returns a fresh model of this client's architecture, from its own random stream."""
        return self.facts.build(self.facts.model_of[self.name], self.name, purpose)

    def rng(self, purpose: str) -> torch.Generator:
        """Returns the client's random stream for a purpose. It continues where it stopped."""
        return stream(self.streams, self.facts.seed, "client", self.name, purpose)

    def secret_normal(
        self, shape: tuple[int, ...], scale: float, simulated: torch.Generator
    ) -> Tensor:
        """Returns Gaussian numbers that no other party can compute, in float32.

        A deployed party draws them from the operating system. A simulation plays all parties in one
        process and hides nothing from itself; it draws them from the run's seed, so that it can be
        repeated.

        Args:
            shape: The shape.
            scale: The standard deviation.
            simulated: The random stream of a simulation.
        """
        if self.deployed:
            return entropy_noise(shape, scale).float()
        return scale * torch.randn(shape, generator=simulated)

    def snapshot(self) -> Message:
        """Returns everything that a later round depends on, as tensors."""
        parts = {"state": self.state, "streams": self.streams, "kept": self.kept}
        saved: Message = snapshot(parts)
        return saved

    def restore(self, saved: Message) -> None:
        """Restores a snapshot. The client must have been set up before."""
        restore(self.state, saved.get("state", {}))
        for purpose, state in saved.get("streams", {}).items():
            self.rng(purpose).set_state(state)
        self.kept = saved.get("kept", {})

    def loss(
        self,
        logits: Tensor,
        batch: Graph,
        reduction: str = "mean",
        of_class: Tensor | None = None,
        record: bool = True,
    ) -> Tensor:
        """Returns the cross-entropy over the training items of a batch; 0 if it has none.

        The mean over all calls in a phase is the client's training loss, which the run records.

        Args:
            logits: [items, classes].
            batch: The graph of the logits.
            reduction: "mean" or "sum".
            of_class: Class weights. None: those of the run (`run.class_weight`).
            record: Whether it counts as the client's training loss. False is for networks other
                than the one that is scored.
        """
        weight = self.class_weight if of_class is None else of_class
        loss = training_loss(logits, batch, reduction, weight)
        if record and loss.requires_grad:
            summed = reduction == "sum"
            self.record_loss(loss / batch.train.sum().clamp(min=1) if summed else loss)
        return loss

    def record_loss(self, loss: Tensor) -> None:
        """Adds the loss of a training step to the client's training loss.

        `loss` calls it if the loss has a gradient. A method that fits the scored model to labels by
        a loss of its own calls it, too.

        loss: a scalar, the mean over items.
        """
        self._losses.append(loss.detach())

    def take_training_loss(self) -> Tensor:
        """Returns the mean loss of the last training, once; a scalar.

        It is `metrics.UNDEFINED` if the client has not trained since the last call, has no training
        items, or if the loss is not finite.
        """
        loss: Tensor | None = self.state.pop(LOSS, None)
        if loss is None or not loss.isfinite() or not self.graph.train.any():
            return torch.tensor(UNDEFINED)
        return loss

    @property
    def answers_plainly(self) -> bool:
        """Whether its replies leave as the phase returns them: without secure sums and filters."""
        return type(self._responder) is PlainResponder and not self._upload and not self._download

    @torch.no_grad()
    def validate(self, model: Model) -> float | None:
        """Returns a model's accuracy on the validation items; None if the client has none.

        It may choose between models, but not train them.
        """
        graph = self.full_graph
        right = model(graph)[graph.val].argmax(1) == graph.y[graph.val]
        return right.float().mean().item() if len(right) else None

    def batches(self, size: int) -> list[Graph]:
        """Returns the batches of one epoch.

        A node task has one batch, the whole graph. A graph task has batches of `size` training
        graphs (0: all in one). Their composition is drawn once, so that a batch's adjacency is
        normalised once; epochs differ in the order.
        """
        of_graph, of_size, batches = self._batches
        if of_graph is self.graph and of_size == size:
            return batches
        if self.graph.task == "node":
            # Without a training item, Adam would scale the bare L2 penalty up to full steps.
            batches = [self.graph] if self.graph.train.any() else []
        else:
            items = self.graph.train.nonzero().flatten()
            seed = stream_seed(self.facts.seed, "client", self.name, "batches")
            rng = torch.Generator().manual_seed(seed)
            order = items[torch.randperm(len(items), generator=rng)] if len(items) else items
            chunks = order.split(size or max(len(items), 1)) if len(items) else ()
            batches = [self.graph.select_items(chunk) for chunk in chunks]
        self._batches = (self.graph, size, batches)
        return batches

    def shuffled(self, size: int) -> list[Graph]:
        """Returns the batches of one epoch in a fresh random order."""
        batches = self.batches(size)
        if len(batches) < 2:
            return batches
        order = torch.randperm(len(batches), generator=self.rng("order"))
        return [batches[k] for k in order]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def stream(streams: dict[str, torch.Generator], *names: object) -> torch.Generator:
    """Returns the random stream of the given names, made when it is first used."""
    purpose = str(names[-1])
    if purpose not in streams:
        streams[purpose] = torch.Generator().manual_seed(stream_seed(*names))
    return streams[purpose]
