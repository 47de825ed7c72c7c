"""Loads a graph, divides it, runs FedAvg and Local, and compares them client by client."""

import fedloom

graph = fedloom.load("cora")
federation = fedloom.divide(graph, clients=10, partition="louvain", seed=0)
result = fedloom.run("fedavg", federation, model="gcn", rounds=20, seed=0)
alone = fedloom.run("local", federation, model="gcn", rounds=20, seed=0)

print(f"FedAvg {result.accuracy:.3f}, Local {alone.accuracy:.3f}")
print(f"sent up by all clients: {result.traffic['bytes_up'] / 1e6:.1f} MB")
pairs = zip(result.per_client, alone.per_client, strict=True)
gains = {c["id"]: c["accuracy"] - d["accuracy"] for c, d in pairs}
print("clients that lose by federating:", [name for name, gain in gains.items() if gain < 0])
