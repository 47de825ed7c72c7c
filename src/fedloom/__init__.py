"""fedloom: graph neural networks over graphs that several parties hold and may not share.

graph = fedloom.load("cora")                                  # or fedloom.from_pyg(data), from_networkx(g), from_folder(path)
federation = fedloom.divide(graph, clients=10, partition="louvain", seed=0)
result = fedloom.run("fedavg", federation, model="gcn", seed=0)
print(result.accuracy, result.per_client, result.traffic, result.history)
"""

from fedloom.data.datasets import catalogue, load
from fedloom.data.files import from_folder, from_networkx, from_pyg, to_folder
from fedloom.data.holdings import holdings, plot_holdings
from fedloom.data.partition import divide, partitions
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.errors import ConfigError, DataError, FedloomError, MessageError
from fedloom.graph import Federation, Graph
from fedloom.method import Method, method_class, method_names, phase, setting
from fedloom.runs import Result, read_run, run

__all__ = [
    "ConfigError", "DataError", "Federation", "FedloomError", "Graph", "MessageError", "Method", "Result",
    "catalogue", "divide", "from_folder", "from_networkx", "from_pyg", "holdings", "load", "method_class", "method_names",
    "partitions", "phase", "plot_holdings", "read_run", "run", "setting", "synthetic", "synthetic_graphs", "to_folder",
]  # fmt: skip
