"""The mesh: one port per machine, TLS 1.3 between machines, streams stamped with an epoch. docs/mesh.md says how."""
