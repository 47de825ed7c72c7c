"""Privacy: what the server cannot see. Secure sums, encrypted messages, leakage tests."""
