"""Many functions as one piece of machine code: numba would optimise each with all that it calls, again for each caller.

What is called from the function that is compiled with :class:`OneModule` is only linked. LLVM optimises the whole once.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock

INSIDES = ("_finalize_dynamic_globals", "_get_module_for_linking", "finalize")
"""Methods of numba's that :class:`PartLibrary` takes for granted: it is not used with a release that lacks one."""


class PartLibrary(JITCodeLibrary):
    """A function that is called by others alone: it is linked into what calls it, and no machine code is written."""

    def finalize(self) -> None:
        """Link what it calls."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self) -> PartLibrary:
        """Where numba sets the environment of machine code: here nowhere."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing: there is no machine code of this function alone."""


class OneModule(Compiler):
    """Numba's compiler, for the outermost function of many."""

    def compile_extra(self, function: Any) -> Any:
        """Compile ``function``, with all that it calls as parts. Other threads compile before or after it."""
        with global_compiler_lock:
            codegen = self.state.targetctx.codegen()
            usual = codegen._library_class
            self.state.library = codegen.create_library(function.__qualname__)
            self.state.library.enable_object_caching()
            codegen._library_class = PartLibrary
            try:
                return super().compile_extra(function)
            finally:
                codegen._library_class = usual


def pipeline() -> dict[str, Any]:
    """Options of ``numba.njit`` for the outermost function: none where numba's insides are others."""
    return {"pipeline_class": OneModule} if all(hasattr(JITCodeLibrary, name) for name in INSIDES) else {}
