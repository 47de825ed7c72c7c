"""Data: graphs, and how parties come to hold them."""
