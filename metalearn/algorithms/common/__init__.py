"""The code that algorithms share: losses and gradients, inner optimisers, kinds of learners."""
