"""FedGram."""
QUICK = {"rounds": 1, "width": 8, "sketch": 4, "hops": "1,2"}
OTHER = {"hops": "2,3", "ridges": "2", "personal": "", "colors": 1}
