"""How pages move: the wire, the planes and the mover that verifies what passes."""
