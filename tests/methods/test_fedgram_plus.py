"""FedGram+."""

QUICK = {"score_width": 8, "score_hops": "1,2"}
OTHER = {"base": "fedprox", "score_hops": "3"}
