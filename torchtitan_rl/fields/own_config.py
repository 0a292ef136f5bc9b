"""A torchtitan Configurable that gives each subclass a Config of its own."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable


class OwnConfig(Configurable):
    """A Configurable whose subclasses may leave out `Config`.

    torchtitan builds the class that a Config is nested in. With the parent's Config, a subclass would silently be
    built as its parent. This class therefore gives each subclass its own Config.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """No fields of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "Config" not in cls.__dict__:
            names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            own = type("Config", (cls.Config,), names)
            cls.Config = dataclass(kw_only=True, slots=True)(own)
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Config | None = None, **fields: Any) -> None:
        if config is None:
            name = type(self).__name__
            raise TypeError(
                f"{name} is built by its config. Use {name}.Config({', '.join(fields)})"
            )
        self.config = config
