"""Who computes next: requests, their states, and what a pass over the model holds."""
