"""Layers for per-task weights: every task of a chunk runs through its own network, in one call.

Images are [tasks, samples, height, width, channels]; parameters have a leading task dimension, and may be expanded over
it. Every layer can be differentiated any number of times. On the CPU, compiled kernels (`kernels/`) compute
convolutions and norms whose channels fill the vectors (16 floats with AVX-512). Torch's operations compute the rest.
"""

from metalearn.nn.attention import attention, draw_transformer, transformer
from metalearn.nn.conv import conv2d
from metalearn.nn.layers import linear, max_pool2d, shared_linear
from metalearn.nn.layout import channels_last, laid_out
from metalearn.nn.norm import LINEAR, batch_norm

__all__ = [
    "LINEAR",
    "attention",
    "batch_norm",
    "channels_last",
    "conv2d",
    "draw_transformer",
    "laid_out",
    "linear",
    "max_pool2d",
    "shared_linear",
    "transformer",
]
