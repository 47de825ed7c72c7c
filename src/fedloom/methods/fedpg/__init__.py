"""FedPG, as a package. `method` has the paper's algorithm, `neighbourhoods` its N_h(i) and w_ij."""

from fedloom.methods.fedpg import method
from fedloom.methods.fedpg.method import FedPG

__all__ = ["FedPG"]
__doc__ = method.__doc__  # the method's description, for the documentation
