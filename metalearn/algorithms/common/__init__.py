"""What the algorithms share: losses and gradients, inner optimisers, kinds of learners."""
