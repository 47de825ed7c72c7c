"""Deploy: the same methods across organisations, over Flower."""
