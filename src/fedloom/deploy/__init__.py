"""Deploy: runs the same methods across organisations, over Flower."""
