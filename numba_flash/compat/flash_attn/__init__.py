"""flash-attn 2.8 as programs import it: its functions here, its modules below.

    from numba_flash.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from numba_flash.compat.flash_attn.bert_padding import pad_input, unpad_input
    from numba_flash.compat.flash_attn.layers.rotary import apply_rotary_emb
    from numba_flash.compat.flash_attn.modules.mha import MHA

`install()` provides all of this under the name flash_attn, for programs that cannot be edited.
"""

import importlib
import importlib.util
import sys

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # the release that has these signatures; programs read it
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
MODULES = ("bert_padding", "flash_attn_interface", "layers", "layers.rotary", "modules", "modules.mha")


def install() -> None:
    """Makes `import flash_attn` give this package, in the whole process. It needs torch.

    >>> numba_flash.compat.flash_attn.install()
    >>> from flash_attn.modules.mha import MHA

    Call it before anything imports flash_attn. Libraries that look for the installed distribution, as Transformers
    does, still find none: `numba_flash.compat.transformers.register()` serves them.

    Raises RuntimeError where flash-attn itself is installed or was imported.
    """
    found = sys.modules.get("flash_attn")
    if found is None and importlib.util.find_spec("flash_attn"):
        raise RuntimeError("flash_attn is installed here, and install() would hide it: uninstall it, or import from us")
    if found is not None and found is not sys.modules[__name__]:
        raise RuntimeError("flash_attn was imported already: call install() before whoever imports it")
    named = {f"flash_attn.{name}": importlib.import_module(f"{__name__}.{name}") for name in MODULES}
    sys.modules |= named | {"flash_attn": sys.modules[__name__]}
