"""The code that models share: networks as sequences of stages, and any nn.Module as pure functions."""
