"""The part of kvtier that only decides: no I/O, no clock, no torch, no grpc. Time comes in as an
argument."""
