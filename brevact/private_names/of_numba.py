"""Private names of Numba, without which its kernels are not used: importing this module raises an ImportError then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brevact.private_names.lookup import find, missing

KERNELS = "the compiled CPU kernels"

if TYPE_CHECKING:
    from numba.core.caching import FunctionCache as FunctionCache
    from numba.core.caching import IndexDataCacheFile as IndexDataCacheFile
    from numba.core.ccallback import CFunc as CFunc
else:
    FunctionCache = find("numba.core.caching.FunctionCache", KERNELS)
    IndexDataCacheFile = find("numba.core.caching.IndexDataCacheFile", KERNELS)
    CFunc = find("numba.core.ccallback.CFunc", KERNELS)

normalize_signature = find("numba.core.sigutils.normalize_signature", KERNELS)
get_or_insert_function = find("numba.core.cgutils.get_or_insert_function", KERNELS)

#: Overridden, or set, where they are needed.
ATTRIBUTES = (
    *("numba.core.caching.FunctionCache._index_key", "numba.core.caching.FunctionCache.load_overload"),
    *("numba.core.caching.FunctionCache.save_overload", "numba.core.dispatcher.Dispatcher.enable_caching"),
)
for _path in ATTRIBUTES:
    find(_path, KERNELS)

for _path, _, _message in missing:
    if _path.startswith("numba."):
        raise ImportError(_message)
