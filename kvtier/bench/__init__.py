"""What a KV cache would have done for recorded requests: traces, replay, routing, reports.

Nothing here serves anybody: one thread runs a replay from its first request to its last. It imports
core, packing and client alone, and no daemon is needed.
"""
