"""NN: what a client trains. Models, losses, metrics and training steps, for one client."""
