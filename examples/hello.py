"""What a rank is given, without torch: its place in the gang, its peers, a folder of its own."""

import os
import sys

rank, nodes = os.environ["NODUS_NODE_RANK"], os.environ["NODUS_NUM_NODES"]
print(
    f"hello from rank {rank} of {nodes}, epoch {os.environ['NODUS_GANG_EPOCH']} of {os.environ['NODUS_RUN']}"
)
print(f"peers in rank order: {os.environ['NODUS_NODE_IPS']}")
print(f"rendezvous: {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
print(f"my folder: {os.environ['NODUS_STATE_DIR']}", file=sys.stderr)
