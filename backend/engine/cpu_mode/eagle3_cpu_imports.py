"""Run a function on a module right after it was imported: the only way in which the CPU mode reaches SGLang."""

import importlib.abc
import importlib.util
import sys

_waiting = {}


def after_import(name):
    """Decorator: call the function with module `name` once that module has been executed."""

    def register(function):
        _waiting.setdefault(name, []).append(function)
        return function

    return register


class _Loader(importlib.abc.Loader):
    """The module's own loader, with the waiting functions behind it."""

    def __init__(self, inner, functions):
        self._inner = inner
        self._functions = functions

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        for function in self._functions:
            function(module)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        functions = _waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if functions else None
        if spec is not None:
            spec.loader = _Loader(spec.loader, functions)
        return spec


sys.meta_path.insert(0, _Finder())
