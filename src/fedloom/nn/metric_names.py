"""The names of the metrics. This module does not import torch: reports read it."""

# Metrics of a confusion matrix. Every evaluation computes them.
FROM_CONFUSION = (
    "accuracy",
    "f1_macro",
    "f1_present",
    "f1_weighted",
    "balanced_accuracy",
    "precision",
    "recall",
)
# Metrics of probabilities, except for AUC, which has a tensor of its own in messages.
PROBABILISTIC = ("pr_auc", "recall_at_k", "precision_at_k", "ece")
METRICS = (*FROM_CONFUSION, "auc", *PROBABILISTIC)
MINIMISED = ("ece",)  # the lower, the better
TWO_CLASSES = ("recall_at_k", "precision_at_k")  # not defined for more than two classes
