"""Names of operations and the autograd Nodes they make: ``F.linear`` makes ``AddmmBackward0`` and ``TBackward0``."""

from __future__ import annotations

import functools
import re

_ENDING = re.compile(r"(Backward(Autograd\w+)?\d*\w*|Backward)$")
_BACKENDS = re.compile(r"^(native|cudnn|miopen|mps|mkldnn|thnn|fused)+(?=[a-z])")

GLUE = frozenset(
    {
        *("alias", "asstrided", "clone", "copyslices", "detach", "expand", "flatten", "permute", "reshape"),
        *("reshapealias", "select", "slice", "split", "squeeze", "splitwithsizes", "t", "tocopy", "transpose"),
        *("unbind", "unflatten", "unsafesplit", "unsafeview", "unsqueeze", "view"),
    }
)
"""Nodes that change how a tensor is looked at: any call may make them beside its own."""

_MAKES = {
    name: frozenset(nodes.split())
    for name, nodes in {
        "absolute": "abs",
        "batchnorm": "batchnorm",
        "bilinear": "bmm mul sum add trilinear",
        "binarycrossentropywithlogits": "binarycrossentropywithlogits",
        "chunk": "split slice",
        "clip": "clamp clampmin clampmax",
        "clamp": "clamp clampmin clampmax",
        "concat": "cat",
        "concatenate": "cat",
        "conv1d": "convolution squeeze",
        "conv2d": "convolution",
        "conv3d": "convolution",
        "convtranspose1d": "convolution",
        "convtranspose2d": "convolution",
        "convtranspose3d": "convolution",
        "cosinesimilarity": "mul sum clampmin div linalgvectornorm sqrt",
        "crossentropy": "logsoftmax nllloss nllloss2d",
        "crossentropyloss": "logsoftmax nllloss nllloss2d sum mul neg div mean",
        "divide": "div",
        "dropout": "mul div dropout",
        "einsum": "bmm mul sum mm",
        "eye": "",
        "getitem": "slice select index unsqueeze alias",
        "gru": "gru grucell addmm mm sigmoid tanh sub mul add stack cat rnnlayer unbind",
        "grucell": "addmm mm sigmoid tanh sub mul add grucell chunk",
        "instancenorm": "batchnorm repeat",
        "kldiv": "kldiv mul sub log exp xlogy",
        "l1loss": "abs sub mean sum",
        "layernorm": "layernorm",
        "linear": "addmm mm bmm linear",
        "logsigmoid": "logsigmoid",
        "lstm": "lstm rnnlayer addmm mm sigmoid tanh mul add stack cat unbind",
        "lstmcell": "addmm mm sigmoid tanh mul add lstmcell",
        "matmul": "mm bmm mv dot mul sum",
        "max": "max maximum amax",
        "mean": "mean div sum",
        "min": "min minimum amin",
        "mseloss": "mseloss",
        "multiheadattentionforward": "addmm bmm softmax mul div baddbmm scaleddotproductattention mean",
        "multiply": "mul",
        "negative": "neg",
        "nllloss": "nllloss nllloss2d",
        "norm": "linalgvectornorm norm",
        "normalize": "linalgvectornorm clampmin div",
        "pow": "pow",
        "rnntanh": "rnnlayer addmm mm tanh add stack cat unbind",
        "rnnrelu": "rnnlayer addmm mm relu add stack cat unbind",
        "rnntanhcell": "addmm mm tanh add",
        "rnnrelucell": "addmm mm relu add",
        "rsub": "rsub sub",
        "scaleddotproductattention": "scaleddotproduct mul bmm softmax add",
        "setitem": "copyslices copy fill maskedfill indexput indexputimpl",
        "smoothl1loss": "smoothl1loss",
        "square": "pow",
        "std": "std",
        "sub": "sub rsub",
        "subtract": "sub rsub",
        "sum": "sum add",
        "truedivide": "div reciprocal mul",
        "div": "div reciprocal mul",
        "vectornorm": "linalgvectornorm",
    }.items()
}


@functools.lru_cache(maxsize=2048)
def stem_of_node(name: str) -> str:
    """``addmm`` of ``AddmmBackward0``; a backend's name in front is left out."""
    plain = _ENDING.sub("", name).replace("_", "").lower()
    return _BACKENDS.sub("", plain) if plain not in ("fused",) else plain


@functools.lru_cache(maxsize=4096)
def fits(call: str, node: str) -> bool:
    """Whether the call ``call`` (``sigmoid``, ``__iadd__``) may make the Node ``node`` (``SigmoidBackward0``)."""
    name = call.strip("_").replace("_", "").lower()
    stem = stem_of_node(node)
    if call.startswith("__i") and call.endswith("__"):
        name = name[1:]
    known = _MAKES.get(name)
    if known is not None and any(stem == one or (len(one) > 3 and stem.startswith(one)) for one in known):
        return True
    return stem == name or (len(name) > 2 and (stem.startswith(name) or stem.endswith(name)))


@functools.lru_cache(maxsize=2048)
def is_glue(node: str) -> bool:
    """Whether a Node only changes how a tensor is looked at."""
    return stem_of_node(node) in GLUE
