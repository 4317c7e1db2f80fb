"""Storages that must not be shared copy-on-write: known outside of torch, or about to be resized."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradsan import _torch
from gradsan.record.patches import Patches, standing

_FUNCTIONS = ("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_")
_RESIZED = ((torch.UntypedStorage, "resize_"), (torch.Tensor, "resize_"), (torch.Tensor, "resize_as_"))


class KnownOutside:
    """The storages whose pointer somebody has, while they live."""

    def __init__(self, core: Any) -> None:
        """Start with none."""
        self._core = core
        self._storages: dict[int, Any] = {}

    def install(self, patches: Patches) -> None:
        """Watch the methods by which a pointer is handed out, and those that resize, until ``patches`` is undone."""
        for name in _FUNCTIONS:
            original = standing(torch.Tensor, name)
            if original is not None:
                patches.set(torch.Tensor, name, self._opening(original))
        for owner, name in _RESIZED:
            resize = standing(owner, name)
            if resize is not None:
                patches.set(owner, name, self._resizing(resize))

    def holds(self, storage: int) -> bool:
        """Whether the storage with this ``_cdata`` is known outside."""
        reference = self._storages.get(storage)
        if reference is None:
            return False
        if _torch.is_gone(reference):
            del self._storages[storage]
            return False
        return True

    def _opening(self, original: Any) -> Any:
        known = self

        @functools.wraps(original)
        def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if known._core.active:
                storage = _torch.storage_reference(self)
                if storage is not None:
                    known._storages[_torch.storage_or_none(self)] = storage
            return result

        return opened

    def _resizing(self, resize: Any) -> Any:
        core = self._core

        @functools.wraps(resize)
        def resized(self: Any, *args: Any, **kwargs: Any) -> Any:
            if core.active:
                _torch.give_own_memory(self)
            return resize(self, *args, **kwargs)

        return resized
