"""Which KV is where: prefixes on the device (radix tree), and below it in kvtier."""
