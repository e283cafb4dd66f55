"""`kvtier demo`: prefill in one process, decode in another, a real daemon between them."""
