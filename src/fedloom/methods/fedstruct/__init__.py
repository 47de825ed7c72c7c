"""FedStruct, as a package. `method` has the paper's algorithm, the other modules its parts.

method      settings, the powers of Â (App. D, Algorithm 3), training (Algorithms 1 and 2)
edges       the edges between clients, which both owners know
powers      matrices: own rows of the powers, pruning, conversion to messages
pruning     global pruning (Sec. 5.3)
features    fixed structure features: DEG, FED*, NODE2VEC, GDV
private     sums instead of embeddings (App. G.1)
encrypted   blocks under BFV
sharing     which rows of the blocks travel
attacks     what clients and the server can read
artifacts   pictures for the report
state       what a client keeps from one phase to the next
"""

from fedloom.methods.fedstruct import method
from fedloom.methods.fedstruct.method import FedStruct

__all__ = ["FedStruct"]
__doc__ = method.__doc__  # the method's description, for the documentation
