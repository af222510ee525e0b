"""Builds data sets: draws them from the packages of public registries, and brings in what people have."""
