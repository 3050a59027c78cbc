"""End to end: a real deployment, the real command line as a process, real torchrun with gloo, real kills."""
