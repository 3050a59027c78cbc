"""What the ranks printed: received from the members, kept on disk, rendered as lines, read back.

Theory of operation. A rank's output is a stream of records (`agents.spool`) with one number line: an offset
is a position in that stream, the same in the member's spool, in the frames of `mesh.log_protocol` and in the
names of the files here. So "what do you have" and "go on from there" are one integer, a gap is two files
whose names do not meet, and nothing has to be kept in step with the bytes.

    member's spool ─▶ agents.logs ═ frames ═▶ sink ─▶ writer ─▶ files ─▶ scan ─▶ render ─▶ reader ─▶ API

`render`, `cursor` and `rate` are pure. Everything that touches a file is synchronous and runs in the store's
own threads.
"""
