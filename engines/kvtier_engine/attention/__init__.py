"""Attention over pages, one way a device kind, behind one Protocol."""
