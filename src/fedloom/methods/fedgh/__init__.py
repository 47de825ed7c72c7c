"""FedGH, as a package. `method` has the paper's algorithm, the other modules its parts.

method       settings, what travels, Algorithm 1
vgae         the client's variational graph autoencoder (Eq. 5-7)
diffusion    diffusion of its latents (Eq. 8-10)
contrast     the server's contrastive learning (Eq. 11, 12)
refinement   the refined graph (Eq. 13-15)
artifacts    pictures for the report
"""

from fedloom.methods.fedgh import method
from fedloom.methods.fedgh.artifacts import (
    SHOWN_LINKS,
    SHOWN_NODES,
    between,
    neighbourhood,
    room,
)
from fedloom.methods.fedgh.contrast import Contrast, harmonise
from fedloom.methods.fedgh.diffusion import Schedule
from fedloom.methods.fedgh.method import FedGH
from fedloom.methods.fedgh.refinement import bare, directions, refined

__all__ = [
    "SHOWN_LINKS",
    "SHOWN_NODES",
    "Contrast",
    "FedGH",
    "Schedule",
    "bare",
    "between",
    "directions",
    "harmonise",
    "neighbourhood",
    "refined",
    "room",
]
__doc__ = method.__doc__  # the method's description, for the documentation
