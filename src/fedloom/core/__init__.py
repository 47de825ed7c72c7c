"""Core: messages, phases, clients, the server, and the waist that messages pass."""
