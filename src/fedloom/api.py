"""The extension API: everything that the author of a method needs, in one place.

    from fedloom.api import Client, FedAvg, Message, Server, averaged, phase, setting

`docs/adding-a-method.md` explains how to use it.
"""

from fedloom.core.client import Client
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Message, Schema, flatten, tree_map, unflatten
from fedloom.core.method import Method, Plugin
from fedloom.core.phase import (
    Computed,
    Phase,
    averaged,
    peer_messages,
    phase,
    runs_once,
    summed,
)
from fedloom.core.replies import Replies
from fedloom.core.server import Server
from fedloom.core.settings import fewest_items, setting
from fedloom.data.federation import Federation
from fedloom.data.graph import Graph
from fedloom.data.seeds import stream_seed
from fedloom.data.sparse import Sparse
from fedloom.errors import ConfigError, DataError, MessageError, Refusal
from fedloom.methods._shared.local_training import LocalTraining
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedsgd import FedSGD
from fedloom.nn.build import build_model, parse_spec
from fedloom.nn.model import Model, forward_with
from fedloom.nn.training import (
    OPTIMIZERS,
    backward,
    make_optimizer,
    outputs,
    seeded,
    step,
)
from fedloom.nn.weights import (
    Weights,
    extractor_weights,
    inner_product,
    load_weights,
    squared_distance,
    weights,
)

__all__ = [
    "OPTIMIZERS",
    "Client",
    "Computed",
    "ConfigError",
    "DataError",
    "Facts",
    "FedAvg",
    "FedSGD",
    "Federation",
    "Graph",
    "LocalTraining",
    "Message",
    "MessageError",
    "Method",
    "Model",
    "Phase",
    "Plugin",
    "Refusal",
    "Replies",
    "Schema",
    "Server",
    "Sparse",
    "Weights",
    "averaged",
    "backward",
    "build_model",
    "extractor_weights",
    "fewest_items",
    "flatten",
    "forward_with",
    "inner_product",
    "load_weights",
    "make_optimizer",
    "model_schema",
    "outputs",
    "parse_spec",
    "peer_messages",
    "phase",
    "runs_once",
    "seeded",
    "setting",
    "squared_distance",
    "step",
    "stream_seed",
    "summed",
    "tree_map",
    "unflatten",
    "weights",
]
