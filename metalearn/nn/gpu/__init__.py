"""The layers' kernels on a GPU, in Triton; the same functions as those in C beside it (`metalearn/nn/kernels`)."""
