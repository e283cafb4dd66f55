"""The network: its settings, weights, tokens, and one forward pass over paged KV."""
