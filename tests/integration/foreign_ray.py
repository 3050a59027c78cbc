"""Somebody else's Ray on this host: started here, its address on stdout, `nodes` on stdin asks how many it has."""

from __future__ import annotations

import sys

import ray

if __name__ == "__main__":
    context = ray.init(
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=sys.argv[1],
        object_store_memory=80_000_000,
        log_to_driver=False,
    )
    print(context.address_info["gcs_address"], flush=True)
    for _ in sys.stdin:
        print(len(ray.nodes()), flush=True)
    ray.shutdown()
