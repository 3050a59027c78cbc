"""Several hosts on this machine, as network namespaces: real raylets, real torchrun, real losses."""
