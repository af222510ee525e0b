"""Python's way in: train, load, adapt, export; and pictures, folders and drawings for them."""
