"""Names of methods and attributes: of tensors (in place, views, metadata, numbers) and containers (adding, removing).

The lists follow the Tensor API of PyTorch 2.6 to 2.13; ``tests/source`` compares them with the installed one.
"""

from __future__ import annotations

import ast


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Methods whose result is the tensor itself or a view of it, at least sometimes. Those which may copy (``reshape``,
# ``to``) are here because a write into a fresh copy changes no saved value.
ALIASING_METHODS = _words(
    """as_strided as_subclass bfloat16 conj contiguous cpu cuda data_ptr detach diagonal double expand expand_as
    flatten float half int long mH mT moveaxis movedim narrow numpy permute ravel real imag reshape reshape_as
    resolve_conj resolve_neg select squeeze storage swapaxes swapdims t to transpose type type_as unfold
    unflatten unsqueeze untyped_storage values indices view view_as view_as_complex view_as_real
    adjoint __array__ __dlpack__"""
)
ALIASING_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Conversions, methods and functions, that return a copy, or the tensor itself where there is nothing to convert.
CONVERSIONS = _words("asarray as_tensor bfloat16 contiguous cpu cuda double float half to type type_as")
# Methods which return several views; an index after them selects one.
PIECES = _words("chunk split split_with_sizes unsafe_chunk unsafe_split tensor_split unbind hsplit vsplit dsplit")

# Methods that compute a new tensor from all elements of theirs.
MAKING_NEW = _words(
    """abs acos add addmm amax celu elu gelu leaky_relu logsigmoid mish selu silu softmin softplus amin asin
    atan bmm ceil clamp clone cos cosh cumprod cumsum div erf exp expm1 floor log log1p log_softmax logsumexp
    masked_fill matmul max maximum mean min minimum mm mul neg norm pow prod reciprocal relu round rsqrt sigmoid
    sign sin sinh softmax sqrt square std sub sum tan tanh var where"""
)

# Functions of torch and torch.nn.functional that do so, too; as methods of an object they may be a module's layers.
FUNCTIONS_MAKING_NEW = _words(
    """addbmm addcdiv addcmul addmv addr baddbmm bilinear bincount cat cdist concat conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d cosine_similarity cross cross_entropy dot embedding empty
    empty_like full full_like gather group_norm hstack huber_loss hypot index_select kl_div kron l1_loss layer_norm
    lerp linear logaddexp mse_loss mv nan_to_num normalize ones ones_like outer pairwise_distance pdist rand
    rand_like randn randn_like repeat_interleave roll scaled_dot_product_attention smooth_l1_loss stack tril triu
    vstack zeros zeros_like"""
)

# ``loss.backward()``, also ``accelerator.backward(loss)``, and Lightning's ``self.manual_backward(loss)``.
BACKWARDS = frozenset({"backward", "manual_backward"})

# The operations under which ``x[i] = v`` reaches PyTorch's dispatcher.
SETITEM_OPS = _words("__setitem__ copy_ fill_ index_put_ _index_put_impl_ masked_fill_ masked_scatter_ index_fill_")
# Operations run by modules and functionals with ``inplace=True``.
ACTIVATION_OPS = _words(
    """relu_ relu6_ leaky_relu_ rrelu_ rrelu_with_noise_ prelu_ elu_ selu_ celu_ silu_ mish_ hardswish_ hardsigmoid_
    hardtanh_ threshold_ dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ gelu_ clamp_ clamp_min_
    clamp_max_ sigmoid_ tanh_"""
)

# Methods of a tensor that change it in place. Methods of other objects may end with an underscore, too.
INPLACE_METHODS = _words(
    """abs_ absolute_ acos_ acosh_ add_ addbmm_ addcdiv_ addcmul_ addmm_ addmv_ addr_ apply_ arccos_ arccosh_ arcsin_
    arcsinh_ arctan2_ arctan_ arctanh_ as_strided_ asin_ asinh_ atan2_ atan_ atanh_ baddbmm_ bernoulli_ bitwise_and_
    bitwise_left_shift_ bitwise_not_ bitwise_or_ bitwise_right_shift_ bitwise_xor_ cauchy_ ceil_ clamp_ clamp_max_
    clamp_min_ clip_ conj_physical_ copy_ copysign_ cos_ cosh_ cumprod_ cumsum_ deg2rad_ detach_ digamma_ div_
    divide_ eq_ erf_ erfc_ erfinv_ exp2_ exp_ expm1_ exponential_ fill_ fill_diagonal_ fix_ float_power_ floor_
    floor_divide_ fmod_ frac_ gcd_ ge_ geometric_ greater_ greater_equal_ gt_ heaviside_ hypot_ i0_ igamma_ igammac_
    index_add_ index_copy_ index_fill_ index_put_ index_reduce_ lcm_ ldexp_ le_ lerp_ less_ less_equal_ lgamma_
    log10_ log1p_ log2_ log_ log_normal_ logical_and_ logical_not_ logical_or_ logical_xor_ logit_ lt_ map2_ map_
    masked_fill_ masked_scatter_ mul_ multiply_ mvlgamma_ nan_to_num_ ne_ neg_ negative_ nextafter_ normal_
    not_equal_ polygamma_ pow_ put_ rad2deg_ random_ reciprocal_ relu_ remainder_ rename_ renorm_ requires_grad_
    resize_ resize_as_ resize_as_sparse_ round_ rsqrt_ scatter_ scatter_add_ scatter_reduce_ set_ sgn_ share_memory_
    sigmoid_ sign_ sin_ sinc_ sinh_ sparse_resize_ sparse_resize_and_clear_ sqrt_ square_ squeeze_ sub_ subtract_
    swap_ swapaxes_ swapdims_ t_ tan_ tanh_ transpose_ tril_ triu_ true_divide_ trunc_ uniform_ unsqueeze_ xlogy_
    zero_"""
)
# Methods that replace every element without reading it.
OVERWRITING = _words(
    """bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_"""
)
# Methods without an out-of-place counterpart of the same name that keeps shape, dtype and meaning.
WITHOUT_COUNTERPART = _words(
    """eq_ fill_diagonal_ float_power_ ge_ greater_ greater_equal_ gt_ le_ less_ less_equal_ logical_and_ logical_not_
    logical_or_ logical_xor_ lt_ ne_ not_equal_"""
)
# Methods that change the tensor's metadata instead of its values, or call back into Python.
CHANGING_METADATA = _words(
    """apply_ map2_ map_ rename_ requires_grad_ resize_ resize_as_ resize_as_sparse_ set_ share_memory_ sparse_resize_
    sparse_resize_and_clear_ swap_"""
)

# Attributes and methods that read no values of a tensor: a write or a ``detach()`` changes nothing for them.
METADATA = _words(
    """shape size dtype device dim ndim ndimension numel nelement layout requires_grad grad_fn is_leaf is_cuda
    stride is_contiguous element_size itemsize data_ptr storage_offset _version"""
)
# Methods whose result is numbers without a graph.
NUMBERS = frozenset({"item", "numpy", "tolist"})
# Methods whose result has no graph.
CUTTING = NUMBERS | {"detach", "detach_"}

# Methods of a list or deque that keep one argument, the last; no tensor has them.
LIST_ADDS = frozenset({"append", "appendleft", "insert"})
# Methods of containers that keep one argument, and its position.
KEEPS_ONE = {"append": 0, "appendleft": 0, "add": 0, "insert": 1, "push": 0, "put": 0}
KEEPS_SEVERAL = frozenset({"extend", "extendleft", "update"})
# Methods that add to a container. Called on a tensor as a bare statement, ``add`` would do nothing.
ADDING = frozenset({*KEEPS_ONE, *KEEPS_SEVERAL, "setdefault"})
TAKING_OUT = frozenset({"clear", "discard", "pop", "popitem", "popleft", "remove"})
CONTAINERS = frozenset(
    {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"}
)

# Functions of torch whose result has no graph, whatever the arguments (that of ``torch.normal`` may have one).
MADE_FROM_NOTHING = frozenset(
    {
        *("arange", "empty", "empty_like", "eye", "from_numpy", "full", "full_like", "linspace", "logspace"),
        *("multinomial", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("randperm", "tensor", "zeros", "zeros_like"),
    }
)

# Functions and methods whose result has no values worth restoring: memory to be filled.
BLANK = _words(
    """empty empty_like full full_like new_empty new_full new_ones new_zeros ones ones_like zeros zeros_like"""
)

_SAME = dict(
    pair.split("=")
    for pair in _words(
        """absolute_=abs_ arccos_=acos_ arccosh_=acosh_ arcsin_=asin_ arcsinh_=asinh_ arctan_=atan_ arctan2_=atan2_
        arctanh_=atanh_ clip_=clamp_ divide_=div_ fix_=trunc_ greater_=gt_ greater_equal_=ge_ less_=lt_
        less_equal_=le_ multiply_=mul_ negative_=neg_ not_equal_=ne_ subtract_=sub_ swapaxes_=transpose_
        swapdims_=transpose_ true_divide_=div_"""
    )
)
METHODS: dict[type[ast.operator], str] = {
    getattr(ast, kind): name
    for kind, name in (
        pair.split("=")
        for pair in _words(
            """Add=add Sub=sub Mult=mul Div=div FloorDiv=floor_divide Mod=remainder Pow=pow MatMult=matmul
            BitAnd=bitwise_and BitOr=bitwise_or BitXor=bitwise_xor LShift=bitwise_left_shift
            RShift=bitwise_right_shift"""
        )
    )
}
"""The method of tensors that an operator is, without the underscore of its in-place form."""
_SPECIAL = {"div": "truediv", "floor_divide": "floordiv", "remainder": "mod"}


def operation_name(op: str) -> str:
    """The bare operation name: ``add_`` for ``aten::add_.Tensor``, ``torch.Tensor.add_`` and ``add_``."""
    parts = op.rsplit("::", 1)[-1].split(".")
    return next((part for part in reversed(parts) if is_inplace_name(part) or part.startswith("__")), parts[-1])


def is_inplace_name(name: str) -> bool:
    """Whether ``name`` is an in-place function by PyTorch's convention: it ends with one underscore."""
    return name.endswith("_") and not name.endswith("__") and name != "_"


def is_inplace_method(name: str) -> bool:
    """Whether ``name`` is a method that changes a tensor in place; a name alone says nothing of other classes."""
    return name in INPLACE_METHODS


def special_name(operator: ast.operator) -> str:
    """``__iadd__`` of ``+=``."""
    name = METHODS[type(operator)]
    bare = name.removeprefix("bitwise_").replace("left_shift", "lshift").replace("right_shift", "rshift")
    return f"__i{_SPECIAL.get(name, bare)}__"


def augmented_names(operator: ast.operator) -> frozenset[str]:
    """The special method and the Tensor method that ``x <operator>= y`` calls."""
    others = {ast.Mod: {"fmod_"}, ast.Div: {"__idiv__"}}.get(type(operator), set())
    method = {f"{METHODS[type(operator)]}_"} if not isinstance(operator, ast.MatMult) else set()
    return frozenset({special_name(operator), *method, *others})


def same_operation(written: str, op: str) -> bool:
    """Whether the method ``written`` in the source is the operation ``op``; PyTorch has several names for some."""
    return _SAME.get(written, written) == _SAME.get(op, op)


def has_attribute(node: ast.AST, *names: str) -> bool:
    """Whether ``node`` reads or binds an attribute of one of these names, of whatever object."""
    return any(isinstance(one, ast.Attribute) and one.attr in names for one in ast.walk(node))
