"""Parts of bench/speed.py about large graphs, memory and growth."""

import time
from statistics import median

import speed_tools as tools
from speed_rounds import STACKED, measured
from speed_tools import Row, forget_peak, gaps, job, memory, part, seconds_a_round

import fedloom

part(measured("arxiv"))


@part
def products(quick: bool) -> list[Row]:
    """A complete run with decoupled models on a graph of the size of ogbn-products.

    It includes the partition, the propagation and 20 rounds of one epoch. CPU seconds.
    """
    dataset = "synthetic-products:nodes=3000" if quick else "synthetic-products"
    cases = [("sgc-2x64", "louvain"), ("sgc-2x64", "random"), ("sign-2x64", "louvain")]
    return [
        end_to_end(older, dataset=dataset, model=model, partition=name, rounds=20)
        for model, name in cases
        for older in (True, False)
        # The older code runs only once: one run of it takes minutes.
        if not older or (tools.before is not None and (model, name) == cases[0])
    ]


@job
def end_to_end(dataset: str, model: str, partition: str, rounds: int) -> Row:
    """Measures the CPU seconds of each stage and the peak of the process."""
    clock = [time.process_time()]
    graph = fedloom.load(dataset)
    clock.append(time.process_time())
    federation = fedloom.divide(graph, 10, partition, 0)
    del graph
    clock.append(time.process_time())
    made = memory("VmHWM")
    result = fedloom.run(
        "fedavg",
        federation,
        model=model,
        rounds=rounds,
        epochs=1,
        engine="stacked",
        callbacks=lambda entry: clock.append(time.process_time()),
    )
    made_in, divided_in, first, *others = gaps(clock)
    return {
        "graph_s": made_in,
        "partition_s": divided_in,
        "first_round_s": first,
        "round_s": median(others),
        "total_s": clock[-1] - clock[0],
        "peak_before_mb": made,
        "peak_mb": memory("VmHWM"),
        "accuracy": result.accuracy,
    }


@part
def prediction(quick: bool) -> list[Row]:
    """Predicted and measured peak memory of runs of FedAvg with 10 clients by Louvain.

    Each run has its own process.
    """
    sets = ("synthetic:nodes=300",) if quick else ("cora", "pubmed", "photo", "synthetic-arxiv")
    return [
        predicted(dataset=dataset, model=model)
        for dataset in sets
        for model in ("gcn-2x64", "sgc-2x64", "gat-2x64")
    ]


@job
def predicted(dataset: str, model: str) -> Row:
    """Measures the MB before the run and at its peak, and returns the predicted peak.

    The peak before the run does not count.
    """
    federation = fedloom.divide(fedloom.load(dataset), 10, "louvain", 0)
    forget_peak()
    before = memory("VmRSS")
    summary = fedloom.run("fedavg", federation, model=model, rounds=3, engine="stacked").summary
    return {
        "before_mb": before,
        "predicted_mb": summary["memory_predicted_mb"],
        "peak_mb": memory("VmHWM"),
    }


@part
def growth(quick: bool) -> list[Row]:
    """Time and memory of a round of FedAvg for growing nodes, edges and features.

    One of them grows at a time, over two decades.
    """
    steps = (1, 10) if quick else (1, 3.1623, 10, 31.623, 100)
    small = {"nodes": 2000 if quick else 10_000, "degree": 8.0, "features": 32}
    axes = {
        "nodes": [{**small, "nodes": round(small["nodes"] * k / 10) * 10} for k in steps],
        "edges": [{**small, "nodes": 2 * small["nodes"], "degree": 2.0 * k} for k in steps],
        "features": [
            {**small, "nodes": 2 * small["nodes"], "features": round(10 * k)} for k in steps
        ],
    }
    rows = []
    for axis, points in axes.items():
        found = [growing(**point) for point in points]
        amounts = [row["nodes"] * row["degree"] if axis == "edges" else row[axis] for row in found]
        rows += [
            {"axis": axis, "amount": amount, **row}
            for amount, row in zip(amounts, found, strict=True)
        ]
    return rows


@job
def growing(nodes: int, degree: float, features: int) -> Row:
    """Measures a round in ms with 10 clients, and the MB of graphs and run in sum."""
    begun = memory("VmRSS")
    graph = fedloom.synthetic(nodes, 5, features, degree, degree_exponent=0, blocks=10)
    federation = fedloom.divide(graph, 10, "blocks", 0)
    del graph
    forget_peak()
    took = seconds_a_round(STACKED, federation, 7)
    return {"ms": 1000 * median(took), "mb": max(1.0, memory("VmHWM") - begun)}


@part
def clients(quick: bool) -> list[Row]:
    """A round of FedAvg and of FedProto with 100 to 10,000 clients of 100 nodes."""
    counts = (2, 20) if quick else (100, 316, 1000, 3162, 10_000)
    return [
        {"amount": count, **many_clients(count=count, method=method)}
        for method in ("fedavg", "fedproto")
        for count in counts
    ]


@job
def many_clients(count: int, method: str) -> Row:
    """Measures a round in ms, and the MB of graphs and run in sum."""
    begun = memory("VmRSS")
    federation = fedloom.synthetic_clients(count)
    forget_peak()
    took = seconds_a_round(STACKED, federation, 4, method=method)
    return {"ms": 1000 * median(took), "mb": max(1.0, memory("VmHWM") - begun)}
