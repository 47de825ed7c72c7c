"""Core: the waist. Messages, phases, clients, the server, and everything that passes between them."""
