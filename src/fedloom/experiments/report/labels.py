"""Labels: the name under which each number of a summary is shown.

The console, the report and `watch` use these names, so that a name means the same number
everywhere. This module does not import torch.

`accuracy` is the test accuracy at the round with the best validation score, the mean over clients
weighted by their size. Every other test score is of the same round, and weighted in the same way.
"""

_LABELS = {
    "f1_macro": "macro F1",
    "f1_present": "macro F1 of present classes",
    "f1_weighted": "weighted F1",
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "ece": "calibration error (ECE)",
    "loss": "training loss",
}


def label(name: str) -> str:
    """Returns the name under which a number is shown.

    "pr_auc" gives "PR-AUC", "val_auc" gives "validation AUC", and "accuracy_mean" gives "accuracy,
    mean over clients".
    """
    for prefix, word in (("val_", "validation"), ("final_", "final")):
        if name.startswith(prefix):
            return f"{word} {label(name.removeprefix(prefix))}"
    if name.endswith("_mean"):
        return f"{label(name.removesuffix('_mean'))}, mean over clients"
    return _LABELS.get(name, name.replace("_", " "))
