"""Other KV stores, measured in turn with kvtier; each in an environment of its own."""
