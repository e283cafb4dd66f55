"""The ways bytes move between a client and its daemon, behind one Protocol (`base.Plane`)."""
