"""Kernels are tested in two processes: as PyTorch operators in the ordinary suite, and, under ``TRITON_INTERPRET=1``, as
kernels in Triton's interpreter (the tests marked ``interpreter``). One process cannot do both."""

import pytest

from energylab.kernels.available import INTERPRETED


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "/kernels/" not in item.path.as_posix():
            continue
        marked = item.get_closest_marker("interpreter") is not None
        if marked and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
        if INTERPRETED and not marked:
            item.add_marker(pytest.mark.skip(reason="not under TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True, scope="session")
def _patch_the_language_once():
    """The interpreter patches ``triton.language`` again at each call of a device function, a third of its time. The launch
    has done so already, except for the module that the library's own functions see, where once is enough.
    """
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        core = [value for value in self.fn.__globals__.values() if value is tl.core]
        if core and "core" not in patched:
            interpreter._patch_lang(self.fn)
            patched.add("core")
        return self.rewrite()(*args, **kwargs)

    original = interpreter.InterpretedFunction.__call__
    interpreter.InterpretedFunction.__call__ = call
    yield
    interpreter.InterpretedFunction.__call__ = original
