"""Layers for per-task weights: every task of a chunk runs through its own network, in one call.

Images are [tasks, samples, height, width, channels]; parameters carry a leading task dimension, over which they may
be expanded. Every layer can be differentiated any number of times. On the CPU convolution and norm are compiled
kernels (`kernels/`) where numbers of channels fill their vectors (16 floats with AVX-512); elsewhere, torch's
operations.
"""

from metalearn.nn.conv import conv2d
from metalearn.nn.layout import channels_last, laid_out
from metalearn.nn.linear import linear
from metalearn.nn.norm import LINEAR, batch_norm
from metalearn.nn.pool import max_pool2d

__all__ = ["LINEAR", "batch_norm", "channels_last", "conv2d", "laid_out", "linear", "max_pool2d"]
