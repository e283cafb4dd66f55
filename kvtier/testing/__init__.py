"""What kvtier's own tests are built from, shipped so that tiers and bindings elsewhere can use it.

Nothing outside tests imports this package; it may need pytest and hypothesis.
"""
