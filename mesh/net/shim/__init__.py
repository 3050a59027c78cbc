"""Capture without rights: a C library in the program connects to the gateway what is meant for an overlay address."""
