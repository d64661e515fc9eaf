"""What the sections of a configuration have in common."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A group of fields: immutable, closed to unknown keys, and to numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def _several(sources: Any) -> Any:
    return (sources,) if isinstance(sources, str) else sources


Sources = Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)]
"""One or several sources of questions; in a recipe, one may stand without a list."""
Temperature = Annotated[float, Field(ge=0.01, le=100)]
"""vLLM takes lower ones for 0.01; at higher ones every token is about equally likely."""
StopString = Annotated[str, Field(min_length=1)]
