"""Where tasks come from: each source makes task number i of a split, the same wherever it is asked."""
