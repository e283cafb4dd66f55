"""`kvtier bench fidelity`: what storing KV in a codec does to a model's output."""
