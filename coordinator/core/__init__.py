"""What decides. Pure: no clock, no randomness, no I/O; events in, effects out."""
