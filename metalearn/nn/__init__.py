"""Layers for per-task weights: every task of a chunk runs through its own network, in one call.

Images are [tasks, samples, height, width, channels]; parameters have a leading task dimension, and may be expanded over
it. Every layer can be differentiated any number of times. On the CPU, compiled kernels (`kernels/`) compute
convolutions and norms whose channels fill the vectors (16 floats with AVX-512). Torch's operations compute the rest.
"""
