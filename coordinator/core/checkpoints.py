"""Which parts of the ranks make a gang checkpoint, and which checkpoint a restart begins with. Decided, per run.

Theory of operation. Ranks report parts (snapshots of their state directories that are in the store already). When one
of every rank fits together it is *wished for* (`CommitCheckpoint`); the shell verifies that the store has all of it
and writes the manifest; only its word (`committed_as`) makes it committed. Parts fit together

- when they stand for the same step: the ranks' own word for it, whenever each was taken;
- or, where a rank's part names no step, when that rank (and with it every other one, unless the part is empty) says,
  asked after all parts were here, that its directory still is what the part says. Then all directories were at rest at
  one moment, without any clock being compared.

Rules of this file:
1. Pure. Whoever owns it journals `to_record` before it performs what comes out; everything may be performed twice.
2. Only parts and answers of the current epoch count. `begin_epoch` forgets the ones before it, and a wish that the
   store has not answered: its number is never used again, so what a ghost still writes is of no checkpoint.
3. Numbers grow with every wish. Steps do not fall below the newest whole checkpoint's.
4. A damaged checkpoint is never offered again; the one before it is.
5. The newest KEEP stay, and what the epoch under way was restored from.
6. Bounded: PARTS_MAX parts of a rank, one wish, one question at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mesh.checkpoint_format import RestoreReference, checkpoint_id
from mesh.ids import NO_EPOCH, Epoch, Rank

KEEP = 3
PARTS_MAX = 8
STEPS_MAX = 16
EMPTY_FILES = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFact:
    """One rank's part, as its member reported it."""

    number: int
    """Of the member's parts in this epoch: a later one is newer."""
    digest: str
    content: str
    """Equal for parts that differ in logs only: those are not worth another checkpoint."""
    steps: tuple[int, ...] = ()
    files: int
    """Logs and folders left out."""
    size_bytes: int

    @property
    def is_empty(self) -> bool:
        return self.files == EMPTY_FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Verify that the store has these parts whole, and write the manifest. Idempotent: the number names it."""

    number: int
    epoch: Epoch
    step: int | None
    parts: tuple[str, ...]
    """Digests, in rank order."""
    contents: tuple[str, ...]
    """Their contents."""

    @property
    def id(self) -> str:
        return checkpoint_id(self.epoch, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAboutPart:
    """Ask a rank whether its directory still is this part."""

    rank: Rank
    question: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanCheckpointStore:
    """Remove what no checkpoint, and no part that may become one, needs."""

    numbers: tuple[int, ...]
    """Manifests that stay."""
    parts: tuple[str, ...]
    """Parts that stay though no manifest has them yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetakePart:
    """Tell a rank that the store has lost this part: it is to be taken again."""

    rank: Rank
    digest: str


CheckpointEffect = CommitCheckpoint | AskAboutPart | RetakePart | CleanCheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A gang checkpoint whose manifest is in the store."""

    number: int
    epoch: Epoch
    step: int | None
    parts: tuple[str, ...]
    contents: tuple[str, ...]
    uri: str
    size_bytes: int
    created_at: float
    """Wall clock, for people."""
    damage: str = ""
    """What a restore found wrong with it; such a one is not offered."""

    @property
    def id(self) -> str:
        return checkpoint_id(self.epoch, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    number: int
    step: int | None
    parts: tuple[str, ...]
    contents: tuple[str, ...]
    waiting: frozenset[Rank]


@dataclass(kw_only=True)
class Checkpoints:
    """A run's."""

    world_size: int
    epoch: Epoch = NO_EPOCH
    committed: list[Committed] = field(default_factory=list)
    """Oldest first."""
    wish: CommitCheckpoint | None = None
    """Asked for and not answered yet."""
    numbers: int = 0
    """The last number given away."""
    restored: int | None = None
    """The number of the checkpoint that the epoch began with."""
    _parts: dict[Rank, list[PartFact]] = field(default_factory=dict)
    """Of the current epoch, newest last."""
    _question: _Question | None = None
    _questions: int = 0

    # ---- reading -----------------------------------------------------------------------------------

    @property
    def newest(self) -> Committed | None:
        """The newest whole one."""
        return next((one for one in reversed(self.committed) if not one.damage), None)

    def reference(self) -> RestoreReference | None:
        """What an epoch that begins now is restored from."""
        newest = self.newest
        if newest is None:
            return None
        return RestoreReference(number=newest.number, id=newest.id, step=newest.step, uri=newest.uri)

    # ---- what happens ------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch) -> RestoreReference | None:
        """A new epoch: what it is restored from. Everything of older ones is void from here."""
        self.epoch = epoch
        self._parts = {}
        self._question = None
        self.wish = None
        reference = self.reference()
        self.restored = None if reference is None else reference.number
        return reference

    def part_stored(self, *, epoch: Epoch, rank: Rank, part: PartFact) -> list[CheckpointEffect]:
        """A member has stored a part. May be told twice."""
        if epoch != self.epoch or not 0 <= rank < self.world_size:
            return []
        known = self._parts.setdefault(rank, [])
        if any(one.number >= part.number for one in known):
            return []
        known.append(replace(part, steps=tuple(sorted(part.steps))[-STEPS_MAX:]))
        del known[:-PARTS_MAX]
        return self._decide()

    def answered(
        self, *, epoch: Epoch, rank: Rank, question: int, digest: str, holds: bool
    ) -> list[CheckpointEffect]:
        """A member's answer to `AskAboutPart`."""
        asked = self._question
        if asked is None or epoch != self.epoch or question != asked.number or rank not in asked.waiting:
            return []
        if digest != asked.parts[rank]:
            return []
        if not holds:
            self._question = None  # it has changed: its next part leads to another try
            return []
        waiting = asked.waiting - {rank}
        self._question = replace(asked, waiting=waiting)
        if waiting or self.wish is not None:
            return []
        self._question = None
        return self._wish_for(asked.step, asked.parts, asked.contents)

    def committed_as(
        self, *, number: int, uri: str, size_bytes: int, created_at: float
    ) -> list[CheckpointEffect]:
        """The manifest of a wish is in the store. Of a wish that is void: nothing."""
        wish = self.wish
        if wish is None or wish.number != number:
            return []
        self.wish = None
        self.committed.append(
            Committed(
                number=number,
                epoch=wish.epoch,
                step=wish.step,
                parts=wish.parts,
                contents=wish.contents,
                uri=uri,
                size_bytes=size_bytes,
                created_at=created_at,
            )
        )
        self._forget_parts_before(wish.step)
        self._retire()
        decided = self._decide()  # first: what it wishes for must outlive the cleaning
        return [self._cleaning(), *decided]

    def not_committed(self, *, number: int, lacking: Iterable[str]) -> list[CheckpointEffect]:
        """The store lacks something of these parts: they are none."""
        wish = self.wish
        if wish is None or wish.number != number:
            return []
        self.wish = None
        gone = set(lacking) or set(wish.parts)
        retaken: list[CheckpointEffect] = []
        for rank, parts in sorted(self._parts.items()):
            if parts and parts[-1].digest in gone:
                retaken.append(RetakePart(rank=rank, digest=parts[-1].digest))
                if not parts[-1].steps:  # only the newest of those can still hold
                    parts.clear()
            parts[:] = [part for part in parts if part.digest not in gone]
        return [*retaken, *self._decide()]

    def rank_began_again(self, rank: Rank) -> None:
        """Its command starts anew within the epoch: it counts its parts from 1 again, and what it has said is void."""
        self._parts.pop(rank, None)
        self._question = None

    def found_damaged(self, *, number: int, why: str) -> Committed | None:
        """A restore could not use this checkpoint. Returns the record that changed, None when none did."""
        for place, one in enumerate(self.committed):
            if one.number == number and not one.damage:
                self.committed[place] = replace(one, damage=why or "damaged")
                return self.committed[place]
        return None

    def recovered(self) -> list[CheckpointEffect]:
        """After a coordinator's crash: what may not have happened is asked for again."""
        self._question = None
        return [self.wish] if self.wish is not None else self._decide()

    def is_progress(self, one: Committed) -> bool:
        """Whether this checkpoint is further than the whole ones before it."""
        before = [c for c in self.committed if c.number < one.number and not c.damage]
        if not before:
            return True
        if one.step is None:
            return one.contents != before[-1].contents
        return all(c.step is None or c.step < one.step for c in before)

    # ---- deciding ----------------------------------------------------------------------------------

    def _decide(self) -> list[CheckpointEffect]:
        """One part of every rank that fits together, if there is one that is new."""
        if self.wish is not None or not all(self._parts.get(rank) for rank in self._ranks()):
            return []
        unnamed = self._ranks_without_step()
        named = [rank for rank in self._ranks() if rank not in unnamed]
        step, chosen = self._common_step(named)
        if named and step is None:
            return []
        chosen |= {rank: self._parts[rank][-1] for rank in unnamed}
        parts = tuple(chosen[rank].digest for rank in self._ranks())
        contents = tuple(chosen[rank].content for rank in self._ranks())
        if all(part.is_empty for part in chosen.values()) or not self._is_new(step, chosen):
            return []
        if not unnamed:
            return self._wish_for(step, parts, contents)
        return self._ask(step, parts, contents, unnamed)

    def _ranks(self) -> list[Rank]:
        return [Rank(number) for number in range(self.world_size)]

    def _ranks_without_step(self) -> set[Rank]:
        """Those whose newest part names none. Names that count the ranks (`ckpt-0`, `ckpt-1`) are no steps."""
        newest = {rank: self._parts[rank][-1] for rank in self._ranks()}
        if self.world_size > 1 and all(part.steps == (rank,) for rank, part in newest.items()):
            return set(newest)
        return {rank for rank, part in newest.items() if not part.steps}

    def _common_step(self, ranks: list[Rank]) -> tuple[int | None, dict[Rank, PartFact]]:
        """The largest step that all of these have, and each one's newest part that stands for it."""
        by_step = [{step: part for part in self._parts[rank] for step in part.steps} for rank in ranks]
        common = set(by_step[0]).intersection(*by_step[1:]) if by_step else set[int]()
        if not common:
            return None, {}
        step = max(common)
        return step, {rank: steps[step] for rank, steps in zip(ranks, by_step, strict=True)}

    def _is_new(self, step: int | None, chosen: Mapping[Rank, PartFact]) -> bool:
        newest = self.newest
        if newest is None:
            return True
        if step is not None and newest.step is not None and step < newest.step:
            return False
        if step != newest.step:
            return True
        # More of the same step is another checkpoint; a later part that has that step too is not.
        return any(
            part.content != newest.contents[rank]
            and (step is None or not part.steps or part.steps[-1] == step)
            for rank, part in chosen.items()
        )

    def _ask(
        self, step: int | None, parts: tuple[str, ...], contents: tuple[str, ...], unnamed: set[Rank]
    ) -> list[CheckpointEffect]:
        asked = self._question
        if asked is not None and (asked.step, asked.parts) == (step, parts):
            return []
        only_empty = all(self._parts[rank][-1].is_empty for rank in unnamed)
        ranks = sorted(unnamed) if only_empty else self._ranks()
        self._questions += 1
        self._question = _Question(
            number=self._questions, step=step, parts=parts, contents=contents, waiting=frozenset(ranks)
        )
        return [AskAboutPart(rank=rank, question=self._questions, digest=parts[rank]) for rank in ranks]

    def _wish_for(
        self, step: int | None, parts: tuple[str, ...], contents: tuple[str, ...]
    ) -> list[CheckpointEffect]:
        self.numbers += 1
        self._question = None
        self.wish = CommitCheckpoint(
            number=self.numbers, epoch=self.epoch, step=step, parts=parts, contents=contents
        )
        return [self.wish]

    def _forget_parts_before(self, step: int | None) -> None:
        """Those of smaller steps will not be committed any more; each rank's newest stays."""
        for parts in self._parts.values():
            parts[:-1] = [
                part for part in parts[:-1] if step is None or not part.steps or part.steps[-1] > step
            ]

    # ---- retention ---------------------------------------------------------------------------------

    def _retire(self) -> None:
        whole = [one.number for one in self.committed if not one.damage][-KEEP:]
        self.committed = [
            one for one in self.committed if one.number >= whole[0] or one.number == self.restored
        ]

    def _cleaning(self) -> CleanCheckpointStore:
        waiting = {part.digest for parts in self._parts.values() for part in parts}
        waiting.update(() if self.wish is None else self.wish.parts)
        return CleanCheckpointStore(
            numbers=tuple(one.number for one in self.committed), parts=tuple(sorted(waiting))
        )

    # ---- the journal -------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_record` is the inverse, but for a question, which `recovered` asks again."""
        return {
            "world_size": self.world_size,
            "epoch": self.epoch,
            "numbers": self.numbers,
            "questions": self._questions,
            "restored": self.restored,
            "wish": None if self.wish is None else _with_list(asdict(self.wish)),
            "committed": [_with_list(asdict(one)) for one in self.committed],
            "parts": [
                [
                    *(rank, part.number, part.digest, part.content),
                    *(list(part.steps), part.files, part.size_bytes),
                ]
                for rank, parts in sorted(self._parts.items())
                for part in parts
            ],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Checkpoints:
        wish = record["wish"]
        parts: dict[Rank, list[PartFact]] = {}
        for rank, number, digest, content, steps, files, size_bytes in record["parts"]:
            fact = PartFact(
                number=number, digest=digest, content=content, steps=tuple(steps), files=files,
                size_bytes=size_bytes,
            )  # fmt: skip
            parts.setdefault(Rank(rank), []).append(fact)
        return cls(
            world_size=record["world_size"],
            epoch=Epoch(record["epoch"]),
            numbers=record["numbers"],
            _questions=record["questions"],
            restored=record["restored"],
            wish=None if wish is None else CommitCheckpoint(**_with_tuple(wish)),
            committed=[Committed(**_with_tuple(one)) for one in record["committed"]],
            _parts=parts,
        )

    def snapshot(self) -> Checkpoints:
        """A copy that later events do not touch."""
        twin = object.__new__(Checkpoints)
        twin.__dict__.update(self.__dict__)
        twin.committed = list(self.committed)
        twin._parts = {rank: list(parts) for rank, parts in self._parts.items()}
        return twin


def _with_list(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "parts": list(record["parts"]), "contents": list(record["contents"])}


def _with_tuple(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, "parts": tuple(record["parts"]), "contents": tuple(record["contents"])}
