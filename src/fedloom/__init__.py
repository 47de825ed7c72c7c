"""fedloom: federated graph learning. Parties train graph neural networks on graphs they keep.

    graph = fedloom.load("cora")          # or from_pyg(data), from_networkx(g), from_folder(path)
    federation = fedloom.divide(graph, clients=10, partition="louvain", seed=0)
    result = fedloom.run("fedavg", federation, model="gcn", seed=0)
    print(result.accuracy, result.per_client, result.traffic, result.history)

`fedloom.api` has what a method's author needs.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.core.method import Method as Method
    from fedloom.core.registry import method_class as method_class
    from fedloom.core.registry import method_names as method_names
    from fedloom.data.datasets import catalogue as catalogue
    from fedloom.data.datasets import load as load
    from fedloom.data.federation import Federation as Federation
    from fedloom.data.files import from_file as from_file
    from fedloom.data.files import from_folder as from_folder
    from fedloom.data.files import from_networkx as from_networkx
    from fedloom.data.files import from_pyg as from_pyg
    from fedloom.data.files import to_file as to_file
    from fedloom.data.files import to_folder as to_folder
    from fedloom.data.graph import Graph as Graph
    from fedloom.data.partition import divide as divide
    from fedloom.data.partition import partitions as partitions
    from fedloom.data.split import apply_split as apply_split
    from fedloom.data.statistics import partition_statistics as partition_statistics
    from fedloom.data.synthetic import synthetic as synthetic
    from fedloom.data.synthetic import synthetic_clients as synthetic_clients
    from fedloom.data.synthetic import synthetic_graphs as synthetic_graphs
    from fedloom.errors import ConfigError as ConfigError
    from fedloom.errors import DataError as DataError
    from fedloom.errors import FedloomError as FedloomError
    from fedloom.errors import MessageError as MessageError
    from fedloom.experiments.audit_file import Audit as Audit
    from fedloom.experiments.callbacks import Callback as Callback
    from fedloom.experiments.federated_encoding import from_folders as from_folders
    from fedloom.experiments.python_api import audit as audit
    from fedloom.experiments.python_api import compare as compare
    from fedloom.experiments.python_api import report as report
    from fedloom.experiments.python_api import resume as resume
    from fedloom.experiments.python_api import tune as tune
    from fedloom.experiments.report.comparison import Comparison as Comparison
    from fedloom.experiments.report.partition_plot import plot_partition as plot_partition
    from fedloom.experiments.result import Result as Result
    from fedloom.experiments.result import load_run as load_run
    from fedloom.experiments.run import run as run
    from fedloom.experiments.settings import RunSettings as RunSettings
    from fedloom.experiments.trained import TrainedModel as TrainedModel
    from fedloom.experiments.trained import load_model as load_model
    from fedloom.experiments.tune import Tuned as Tuned

# Public names by module, imported when first used: `fedloom --help` does not wait for torch.
_MODULES = {
    "core.method": ("Method",),
    "core.registry": ("method_class", "method_names"),
    "data.datasets": ("catalogue", "load"),
    "data.federation": ("Federation",),
    "data.files": (
        "from_file",
        "from_folder",
        "from_networkx",
        "from_pyg",
        "to_file",
        "to_folder",
    ),
    "data.graph": ("Graph",),
    "data.partition": ("divide", "partitions"),
    "data.split": ("apply_split",),
    "data.statistics": ("partition_statistics",),
    "data.synthetic": ("synthetic", "synthetic_clients", "synthetic_graphs"),
    "errors": ("ConfigError", "DataError", "FedloomError", "MessageError"),
    "experiments.federated_encoding": ("from_folders",),
    "experiments.audit_file": ("Audit",),
    "experiments.callbacks": ("Callback",),
    "experiments.python_api": ("audit", "compare", "report", "resume", "tune"),
    "experiments.report.comparison": ("Comparison",),
    "experiments.report.partition_plot": ("plot_partition",),
    "experiments.result": ("Result", "load_run"),
    "experiments.run": ("run",),
    "experiments.settings": ("RunSettings",),
    "experiments.trained": ("TrainedModel", "load_model"),
    "experiments.tune": ("Tuned",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)
# The loggers "fedloom.*" print nothing unless the user configures logging.
logging.getLogger("fedloom").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from fedloom._system import installed_version

        return installed_version()
    if name not in _MODULE_OF:
        raise AttributeError(f"fedloom has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"fedloom.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
