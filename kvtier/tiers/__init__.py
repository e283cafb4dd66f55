"""The tiers' devices: where page records lie. They move bytes and know no keys."""
