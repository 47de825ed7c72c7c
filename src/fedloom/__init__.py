"""fedloom: graph neural networks over graphs that several parties hold and may not share.

graph = fedloom.load("cora")                                  # or fedloom.from_pyg(data), from_networkx(g), from_folder(path)
federation = fedloom.divide(graph, clients=10, partition="louvain", seed=0)
result = fedloom.run("fedavg", federation, model="gcn", seed=0)
print(result.accuracy, result.per_client, result.traffic, result.history)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.data.datasets import catalogue as catalogue
    from fedloom.data.datasets import load as load
    from fedloom.data.files import from_file as from_file
    from fedloom.data.files import from_folder as from_folder
    from fedloom.data.files import from_networkx as from_networkx
    from fedloom.data.files import from_pyg as from_pyg
    from fedloom.data.files import to_file as to_file
    from fedloom.data.files import to_folder as to_folder
    from fedloom.data.holdings import holdings as holdings
    from fedloom.data.holdings import plot_holdings as plot_holdings
    from fedloom.data.partition import divide as divide
    from fedloom.data.partition import partitions as partitions
    from fedloom.data.split import apply_split as apply_split
    from fedloom.data.synthetic import synthetic as synthetic
    from fedloom.data.synthetic import synthetic_clients as synthetic_clients
    from fedloom.data.synthetic import synthetic_graphs as synthetic_graphs
    from fedloom.errors import ConfigError as ConfigError
    from fedloom.errors import DataError as DataError
    from fedloom.errors import FedloomError as FedloomError
    from fedloom.errors import MessageError as MessageError
    from fedloom.graph import Federation as Federation
    from fedloom.graph import Graph as Graph
    from fedloom.method import Method as Method
    from fedloom.method import method_class as method_class
    from fedloom.method import method_names as method_names
    from fedloom.method import phase as phase
    from fedloom.method import setting as setting
    from fedloom.runs import Result as Result
    from fedloom.runs import read_run as read_run
    from fedloom.runs import run as run

# The public names and where they live. They are imported when first used: `fedloom --help` should not wait for torch.
_HOMES = {
    "data.datasets": ("catalogue", "load"),
    "data.files": ("from_file", "from_folder", "from_networkx", "from_pyg", "to_file", "to_folder"),
    "data.holdings": ("holdings", "plot_holdings"),
    "data.partition": ("divide", "partitions"),
    "data.split": ("apply_split",),
    "data.synthetic": ("synthetic", "synthetic_clients", "synthetic_graphs"),
    "errors": ("ConfigError", "DataError", "FedloomError", "MessageError"),
    "graph": ("Federation", "Graph"),
    "method": ("Method", "method_class", "method_names", "phase", "setting"),
    "runs": ("Result", "read_run", "run"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"fedloom has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"fedloom.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
