"""The service process: owns the tiers of one host and answers for them."""
