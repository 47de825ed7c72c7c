"""Labels: the name under which each number of a summary is shown.

The console, the report and `watch` use these names, so that a name means the same number
everywhere. This module does not import torch.

`accuracy` is the test accuracy at the round with the best validation score, the mean over clients
weighted by their size. Every other test score is of the same round, and weighted in the same way.
"""

LABELS = {
    "accuracy": "accuracy",
    "val_accuracy": "validation",
    "final_accuracy": "final",
    "f1_macro": "macro F1",
    "f1_present": "macro F1 of present classes",
    "f1_weighted": "weighted F1",
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "balanced_accuracy": "balanced accuracy",
    "precision": "precision",
    "recall": "recall",
    "precision_at_k": "precision at k",
    "recall_at_k": "recall at k",
    "ece": "calibration error (ECE)",
    "loss": "training loss",
    "best_round": "best round",
    "bytes_up": "sent up",
    "bytes_down": "sent down",
    "seconds": "seconds",
}


def label(name: str) -> str:
    """Returns the name under which a number is shown. An unknown one is written with spaces."""
    if name not in LABELS and name.startswith("val_"):
        return f"validation {label(name.removeprefix('val_'))}"
    if name not in LABELS and name.endswith("_mean"):
        return f"{label(name.removesuffix('_mean'))}, mean over clients"
    return LABELS.get(name, name.replace("_", " "))
