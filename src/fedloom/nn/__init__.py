"""Neural networks: models, losses, metrics and training steps of one client."""
