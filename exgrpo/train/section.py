"""What the sections of a configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of fields: immutable, closed to unknown keys, and to numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
