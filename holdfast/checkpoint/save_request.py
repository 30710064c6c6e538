"""Request to save the state after a step: what its writer, the agent and the local tiers need, except the tensors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from holdfast.checkpoint.fingerprint import StateDigest


class SaveRequest(BaseModel):
    """One save of one writer. The rank makes it. It travels unchanged to the process that makes the copy durable."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    step: int = Field(ge=0)
    scalars: dict[str, int | float] = {}
    attachments: dict[str, str] = {}  # objects to be written just before the commit: key -> text
    tiers: tuple[str, ...] = ()  # the names of the local tiers that keep it
    committed: bool = True  # whether it becomes a checkpoint
    digest: StateDigest | None = None  # of the writer's boxes, where it is known

    def with_digest(self, digest: StateDigest | None) -> SaveRequest:
        """This request with the digest of the boxes."""
        return self.model_copy(update={"digest": digest})
