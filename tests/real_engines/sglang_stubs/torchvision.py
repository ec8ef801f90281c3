"""Stands in for torchvision, whose wheel on PyPI needs CUDA's torch: SGLang imports it for models that see images."""

import sys
from types import ModuleType

__version__ = "0.0"  # transformers reads it
SUBMODULES = ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Module(ModuleType):
    """A module that has every name."""

    __getattr__ = _Anything.__getattr__


for _name in (f"{__name__}.{_submodule}" for _submodule in SUBMODULES):
    _parent, _, _own = _name.rpartition(".")
    sys.modules[_name] = _Module(_name)
    setattr(sys.modules[_parent], _own, sys.modules[_name])
