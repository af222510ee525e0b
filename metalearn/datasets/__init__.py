"""Builds the data sets of `metalearn data`: drawn ones from packages, and photographs that people have.

Nothing else of metalearn imports this folder, but for that command; without it all else works.
"""
