"""One member on a host of the lab: `python -m tests.lab.member_host PART`. Its orders come by stdin, reports by stdout.

The agent without Ray: a real member with keeper, launcher and command, its network by the host's gateway. The
coordinator is played: reports are lines of JSON, and the signature comes from the authority that the part carries.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agents.launcher.launcher import Launcher
from agents.member import Member, MemberConfig
from agents.mesh_network import MeshNetwork
from agents.preparation import Folders
from mesh.ids import Incarnation, MachineName
from mesh.messages import FenceOrder, JoinOrder, MemberCertificate, MemberReport
from mesh.net.authority import Authority
from mesh.net.identity import MemberIdentity
from mesh.net.paths import NetworkFacts

FENCE_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the process is told."""

    order: JoinOrder
    facts: NetworkFacts
    gateway: Path
    authority: Authority
    machine_dir: Path

    @property
    def folders(self) -> Folders:
        return Folders.of(self.order.incarnation, machine_dir=self.machine_dir)

    async def sign(
        self, incarnation: Incarnation, machine: MachineName, request_pem: bytes
    ) -> MemberCertificate:
        identity = MemberIdentity(
            deployment=self.authority.deployment,
            machine=machine,
            run=incarnation.run_uid,
            epoch=incarnation.epoch,
            rank=incarnation.rank,
        )
        signed = self.authority.sign(request_pem, identity, now=time.time())
        return MemberCertificate(certificate_pem=signed, bundle_pem=self.authority.certificate_pem)


async def tell(report: MemberReport) -> bool:
    fields = asdict(replace(report, at=0.0))
    print(json.dumps({"kind": type(report).__name__, **fields}, default=str), flush=True)
    return True


async def main(part: Part) -> None:
    member = Member(
        MemberConfig(
            address=part.facts.address, machine_dir=part.machine_dir, base_environment=dict(os.environ)
        ),
        send_report=tell,
        launcher=Launcher(),
        network=MeshNetwork(part.facts, gateway=part.gateway, sign=part.sign),
        validate=True,
    )
    member.start()
    await member.join(part.order)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := (await reader.readline()).strip():
        if line == b"fence":
            await member.fence(FenceOrder(incarnation=part.order.incarnation, grace_s=FENCE_GRACE_S))
        else:
            break
    await member.leave()
    await member.close()


if __name__ == "__main__":
    asyncio.run(main(pickle.loads(Path(sys.argv[1]).read_bytes())))
