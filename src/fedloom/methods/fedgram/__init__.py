"""FedGram, as a package.

`method` has the algorithm, `features` and `structure` the maps of nodes, `graph_features` that of
graphs, `ridge` the sums and their solution, `noise` differential privacy.
"""

from fedloom.methods.fedgram import method
from fedloom.methods.fedgram.method import FedGram

__all__ = ["FedGram"]
__doc__ = method.__doc__  # the method's description, for the documentation
