"""Privacy: what the server cannot see. Secure sums, encrypted peer messages, encryption, leakage."""
