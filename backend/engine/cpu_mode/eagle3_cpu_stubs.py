"""Placeholders for packages that a CPU host lacks: any attribute imports, calling one raises and names it."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing(type):
    """Attributes of a placeholder class are names (enum members such as InterpolationMode.BICUBIC are read early)."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _missing(name):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError(f"{name} does not exist in the CPU mode of this server")

    body = {"__init__": refuse, "__class_getitem__": classmethod(lambda cls, item: cls)}
    return _Missing(name.rpartition(".")[2], (), body)


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self._roots = roots

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self._roots or _asked_by_transformers():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = _StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def _asked_by_transformers():
    """transformers must go on believing that torchvision is absent: it would parse its version and take its path."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "transformers.utils.import_utils":
            return True
        frame = frame.f_back
    return False


def install(*roots):
    """Answer imports of these packages, after every real finder has said no."""
    sys.meta_path.append(_Finder(frozenset(roots)))
