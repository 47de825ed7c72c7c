"""FedKD: a private mentor and a common mentee teach each other; only compressed changes travel.

Wu, Wu, Lyu, Huang, Xie: "Communication-efficient federated learning via knowledge distillation",
Nature Communications 13, 2022. The more certain both models are, the more the teaching counts.

What travels, per client (a matrix [m, n] travels as factors [m, r] and [r, n] if r (m + n) < m n,
else whole):
    once     up    size        number of local items n_k
    a round  down  energy      T, the share of the squared singular values that factors keep
                   update      the common model's last change; or, to a client that missed a round,
                   copilot     the common model itself
             up    update      Δ_k, the change of the mentee in E local epochs

    own model (mentor):  min CE + (KL(P_c ‖ P) + ‖z − W z_c‖² / p) / (CE + CE_c)      `losses`
    copilot (mentee):    min CE_c + (KL(P ‖ P_c) + ‖W z_c − z‖² / p) / (CE + CE_c)    `losses`
    Δ ≈ left · right, with the least rank that keeps a share T of the squared
        singular values                                                               `compressed`
    T = T_start + (T_end − T_start) (t − 1) / (R − 1) in round t of R                 `run`
    θ ← θ + Σ_k (n_k / Σ n) Δ_k; this change is compressed in turn                    `run`

W maps the copilot's embeddings to those of the own model. It belongs to the client and is trained
with the copilot. CE + CE_c is a weight, not a term: no gradient passes through it, nor through the
teacher. Where it is near 0 (a client with one class), teaching counts for much. Singular values
come from the Gram matrix of the smaller side, in double precision.

Departures: the factors are of the change in E epochs; the paper has gradients of one step. A
benchmark compresses weights, which have no low rank to use. The hidden-state loss has no attention
maps here. A client that missed a round does not have the state before the last change, so it gets
the whole model.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
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
from fedloom.nn.distillation import squared_error
from fedloom.nn.training import make_optimizer
from fedloom.nn.weights import load_weights, weights


def _factors(method: "FedKD", facts: Facts, message: Message, reply: Message | None) -> Schema:
    """Returns the schema of an update: the copilot's weights, any matrix whole or as factors.

    Factors never have more numbers than the matrix. The longest update would have both.
    """
    update = (reply or {}).get("update")
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape in model_schema(method.copilot, facts):
        if reply is None and len(shape) == 2:
            rows += [(f"{name}/left", dtype, shape), (f"{name}/right", dtype, shape)]
            continue
        part = update.get(name) if isinstance(update, dict) else None
        if isinstance(part, dict) and len(shape) == 2:
            left = part.get("left")
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
        0.98, "T_end, the share in the last round", above=0, at_most=1, tune="0.95..0.99"
    )

    needs_of_model: ClassVar[str] = "embeddings"

    @phase()
    def setup(self, client: Client) -> Message:
        """Builds both models, W, and their optimisers; the copilot's also trains W."""
        super().setup(client)
        state = client.state
        width, own_width = parse_spec(self.copilot).width, state["model"].width
        # Without drawing initial weights, which would advance a random stream.
        W = nn.Linear(width, own_width, bias=False, device="meta").to_empty(device="cpu")
        nn.init.eye_(W.weight)
        state["map"] = W
        state["copilot optimizer"] = make_optimizer(
            self.optimizer,
            [*state["copilot"].parameters(), *W.parameters()],
            self.lr,
            self.weight_decay,
        )
        return {}

    @phase(update=Computed(_factors, depends_on_reply=True, weights=True))
    def train(
        self,
        client: Client,
        energy: Tensor,
        copilot: Message | None = None,
        update: Message | None = None,
    ) -> Message:
        """E local epochs of both models from the common copilot. Answers the copilot's change."""
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
        """Returns the losses of the own model and of the copilot with W."""
        (z, logits), (z_c, logits_c) = own, copilot
        ce, ce_c = client.loss(logits, batch), client.loss(logits_c, batch, record=False)
        mapped = client.state["map"](z_c)
        trust = 1 / (ce + ce_c).detach().clamp(min=1e-8)
        kl = self.taught(batch, teacher=logits_c, student=logits)
        kl_c = self.taught(batch, teacher=logits, student=logits_c)
        own_loss = ce + trust * (kl + squared_error(z, mapped.detach()))
        copilot_loss = ce_c + trust * (kl_c + squared_error(mapped, z.detach()))
        return own_loss, copilot_loss

    def run(self, server: Server) -> None:
        """Collects the copilots' changes, averages them, and sends the result."""
        server.ask(self.setup)
        state = server.state
        state |= {"model": self.first_copilot(server), "update": {}, "taught": {}}
        for t in server.rounds(self.rounds):
            energy = torch.tensor(
                self.start + (self.end - self.start) * (t - 1) / max(self.rounds - 1, 1)
            )
            size = server.weights("size", server.participants)
            # A client of the last round lacks only the last change.
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
                    # A product of finite factors may not be finite.
                    require_finite({"update": change}, f"client {client!r} in 'train'")
                state["update"] = compressed(changes.mean(size), float(energy))
                state["model"] = tree_map(torch.add, state["model"], restored(state["update"]))
                state["taught"] = {c: torch.tensor(t) for c in replies}
            server.evaluate()


def compressed(update: Message, energy: float) -> Message:
    """Returns an update with matrices as factors {left, right}, or whole if factors are no smaller.

    energy: the share of the squared singular values that the factors keep, with the least rank.
    """
    return {
        name: _factorised(tensor, energy) if tensor.dim() == 2 else tensor
        for name, tensor in update.items()
    }


def _factorised(matrix: Tensor, energy: float) -> Tensor | Message:
    if matrix.shape[0] < matrix.shape[1]:
        turned = _factorised(matrix.T, energy)
        if isinstance(turned, Tensor):
            return matrix
        return {"left": turned["right"].T.contiguous(), "right": turned["left"].T.contiguous()}
    squares, directions = torch.linalg.eigh(matrix.double().T @ matrix.double())
    kept = squares.clamp(min=0).flip(0).cumsum(0)
    rank = int((kept < energy * kept[-1]).sum()) + 1 if kept[-1] > 0 else 0
    if rank * sum(matrix.shape) >= matrix.numel():
        return matrix
    right = directions.flip(1)[:, :rank].T.float()
    return {"left": matrix @ right.T, "right": right.contiguous()}


def restored(update: Message) -> Message:
    """Returns an update with all matrices whole: the inverse of `compressed`."""
    return {
        name: part if isinstance(part, Tensor) else part["left"] @ part["right"]
        for name, part in update.items()
    }
