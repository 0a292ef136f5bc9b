"""`OwnConfig`: a Configurable whose subclasses need no `Config` of their own to be built as themselves."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class OwnConfig(Configurable):
    """torchtitan builds the class that a Config is nested in. With its parent's, a subclass would be built as its parent and
    nothing would tell; so each subclass gets its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "Config" not in cls.__dict__:
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            cls.Config = dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), names))
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Config) -> None:
        self.config = config
