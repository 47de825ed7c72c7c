"""FedKD: a private mentor and a common mentee teach each other, the surer the more; what the mentee learnt travels in thin factors.

Wu, Wu, Lyu, Huang, Xie: "Communication-efficient federated learning via knowledge distillation", Nature Communications 13, 2022.

What travels, per client (a matrix [m, n] as factors [m, r] and [r, n] wherever r (m + n) < m n, else whole):
    once     up    size        number of local items n_k
    a round  down  energy      T, the share that factors keep in this round
                   update      the common model's last change; or copilot, the model itself, to a client that missed a round
             up    update      Δ_k, how E local epochs changed the mentee

    own model (mentor):  min CE + (KL(P_c ‖ P) + ‖z − W z_c‖² / p) / (CE + CE_c)                 `losses`
    copilot (mentee):    min CE_c + (KL(P ‖ P_c) + ‖W z_c − z‖² / p) / (CE + CE_c)
    Δ ≈ left · right, the least rank that keeps a share T of the squared singular values         `compressed`
    T = T_start + (T_end − T_start) (t − 1) / (R − 1) in round t of R                            `run`
    θ ← θ + Σ_k (n_k / Σ n) Δ_k, its change compressed in turn                                   `run`

W maps the copilot's embeddings to the own model's; it is the client's, trained with the copilot. CE + CE_c is a weight, not a term: no
gradient passes through it; nor through whoever teaches. Where it is near 0 (a client of one class) teaching counts for much. Singular
values come from the small side's Gram matrix, in double precision.

Departures: factors of what E epochs changed, where the paper has gradients of one step; weights, which a benchmark compresses, have no low
rank to use. The hidden-state loss has no attention maps here. Who missed a round, and so lacks the state before the last change, gets the
whole model.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Message, Schema, require_finite, tree_map
from fedloom.core.phase import Computed, phase
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import setting
from fedloom.data.graph import Graph
from fedloom.errors import MessageError
from fedloom.methods._shared.copilot import Outputs, WithCopilot
from fedloom.nn.build import parse_spec
from fedloom.nn.training import make_optimizer
from fedloom.nn.weights import load_weights, weights


def _factors(method: Any, facts: Facts, message: Message, reply: Message | None) -> Schema:
    """The copilot's weights, any matrix [m, n] whole or as factors [m, r] and [r, n].

    Factors never have more numbers than the matrix.
    """
    given = (reply or {}).get("update")
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in model_schema(method.copilot, facts):
        came = given.get(name) if isinstance(given, dict) else None
        if isinstance(came, dict) and len(shape) == 2:
            left = came.get("left")
            rank = left.shape[1] if isinstance(left, Tensor) and left.dim() == 2 else 0
            rank = min(rank, math.prod(shape) // sum(shape))
            rows.append((f"{name}/left", dtype, (shape[0], rank)))
            rows.append((f"{name}/right", dtype, (rank, shape[1])))
        else:
            rows.append((name, dtype, shape))
    return tuple(sorted(rows))


@dataclass(frozen=True)
class FedKD(WithCopilot):
    """Adaptive mutual learning with a compressed copilot."""

    start: float = setting(
        0.95,
        "T_start, share of the squared singular values kept in the first round",
        above=0,
        at_most=1,
        tune="0.8..0.95",
    )
    end: float = setting(
        0.98, "T_end, that of the last round", above=0, at_most=1, tune="0.95..0.99"
    )

    @phase()
    def setup(self, client: Client) -> Message:
        """Two models and their optimisers; W, which the copilot's optimiser trains along."""
        super().setup(client)
        state = client.state
        state["map"] = model = nn.Linear(
            parse_spec(self.copilot).width, state["model"].width, bias=False, device="meta"
        ).to_empty(device="cpu")
        nn.init.eye_(model.weight)
        parameters = [*state["copilot"].parameters(), *model.parameters()]
        state["copilot optimizer"] = make_optimizer(
            self.optimizer, parameters, self.lr, self.weight_decay
        )
        return {}

    @phase(update=Computed(_factors, depends_on_reply=True))
    def train(
        self,
        client: Client,
        energy: Tensor,
        copilot: Message | None = None,
        update: Message | None = None,
    ) -> Message:
        """E local epochs of both models from the common copilot; then what they changed of it."""
        state, model = client.state, client.state["copilot"]
        who = f"client {client.name!r} in 'train'"
        if copilot is not None:
            state["common"] = copilot
        elif update is not None and "common" in state:
            state["common"] = tree_map(torch.add, state["common"], restored(update))
        else:
            raise MessageError(
                f"to {who}: 'copilot' is missing, and so is the model that an 'update' would change"
            )
        load_weights(model, state["common"])
        self.descend(client, state["model"])
        change = tree_map(torch.sub, weights(model), state["common"])
        require_finite({"update": change}, who)
        return {"update": compressed(change, float(energy))}

    def losses(
        self, client: Client, batch: Graph, own: Outputs, copilot: Outputs
    ) -> tuple[Tensor, Tensor]:
        """What the own model and the copilot (with W) minimise."""
        (z, mine), (z_c, theirs) = own, copilot
        of_own, of_copilot, mapped = (
            client.loss(mine, batch),
            client.loss(theirs, batch),
            client.state["map"](z_c),
        )
        trust = 1 / (of_own + of_copilot).detach().clamp(min=1e-8)
        return (
            of_own + trust * (self.taught(batch, theirs, mine) + F.mse_loss(z, mapped.detach())),
            of_copilot
            + trust * (self.taught(batch, mine, theirs) + F.mse_loss(mapped, z.detach())),
        )

    def run(self, server: Server) -> None:
        """The rounds: the copilot's changes are collected, averaged, and handed out."""
        server.ask(self.setup)
        state = server.state
        state |= {"model": self.first_copilot(server), "update": {}, "taught": {}}
        for t in server.rounds(self.rounds):
            energy = torch.tensor(
                self.start + (self.end - self.start) * (t - 1) / max(self.rounds - 1, 1)
            )
            size = server.weights("size", server.participants)
            # Who took part in the last round lacks the last change alone.
            up_to_date = {
                c: {"update": state["update"]}
                for c in size
                if int(state["taught"].get(c, 0)) == t - 1 > 0
            }
            each = {c: up_to_date.get(c, {"copilot": state["model"]}) for c in size}
            replies = server.ask(self.train, each=each, energy=energy)
            if replies:
                changes = Replies({c: restored(reply["update"]) for c, reply in replies.items()})
                for client, change in changes.items():
                    require_finite(
                        {"update": change}, f"client {client!r} in 'train'"
                    )  # factors may be finite and their product not
                state["update"] = compressed(changes.mean(size), float(energy))
                state["model"] = tree_map(torch.add, state["model"], restored(state["update"]))
                state["taught"] = {c: torch.tensor(t) for c in replies}
            server.evaluate()


def compressed(update: Message, energy: float) -> Message:
    """Each matrix as the thinnest {left, right} that keep the share `energy` of its squares, or whole if that is no larger."""
    return {
        name: _thin(tensor, energy) if tensor.dim() == 2 else tensor
        for name, tensor in update.items()
    }


def _thin(matrix: Tensor, energy: float) -> Tensor | Message:
    if matrix.shape[0] < matrix.shape[1]:
        turned = _thin(matrix.T, energy)
        return (
            matrix
            if isinstance(turned, Tensor)
            else {"left": turned["right"].T.contiguous(), "right": turned["left"].T.contiguous()}
        )
    squares, directions = torch.linalg.eigh(matrix.double().T @ matrix.double())
    kept = squares.clamp(min=0).flip(0).cumsum(0)
    rank = int((kept < energy * kept[-1]).sum()) + 1 if kept[-1] > 0 else 0
    if rank * sum(matrix.shape) >= matrix.numel():
        return matrix
    right = directions.flip(1)[:, :rank].T.float()
    return {"left": matrix @ right.T, "right": right.contiguous()}


def restored(update: Message) -> Message:
    """The matrices again."""
    return {
        name: part if isinstance(part, Tensor) else part["left"] @ part["right"]
        for name, part in update.items()
    }
