"""FedStruct: structure embeddings from a collaboratively computed L-hop adjacency."""

from fedloom.methods.fedstruct.method import FedStruct as FedStruct
