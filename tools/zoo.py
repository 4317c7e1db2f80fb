"""Small models of public libraries, built from their own configs, each with a loss to train it on.

Nothing is downloaded: weights are random, inputs are made from the signature of ``forward``. ``tools/sweep.py`` trains
them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

Loss = Callable[[torch.nn.Module], torch.Tensor]


class CannotBuildError(Exception):
    """This tool does not know how to make a small model of a class, or its inputs; says why."""


class Entry(NamedTuple):
    """A model by name, and what builds it with its loss."""

    name: str
    build: Callable[[], tuple[torch.nn.Module, Loss]]


# Sizes that the configs of transformers name, and what to make of them: divisible by each other where they must be.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "model_dim", "hidden_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim", "d_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "mlp_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "key_length"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 128),
    "vocab_size": 99,
    "image_size": 32,
    "patch_size": 8,
    "num_codevectors_per_group": 8,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "conv_dim": (16, 16, 16),
    "conv_stride": (4, 4, 2),
    "conv_kernel": (8, 4, 2),
    "num_feat_extract_layers": 3,
}
_NO_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")
_LARGEST = 30_000_000
_STUBS = torch.library.Library("torchvision", "FRAGMENT")
_HEADS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)


def entries(library: str) -> Iterator[Entry]:
    """Every model of an installed library: ``transformers``, ``timm`` or ``torchvision``.

    Raises:
        ValueError: for another library.
    """
    makers = {"transformers": _transformers, "timm": _timm, "torchvision": _torchvision}
    if library not in makers:
        raise ValueError(f"the sweep knows {', '.join(makers)}, not {library}")
    _make_torchvision_importable()
    return makers[library]()


def _transformers() -> Iterator[Entry]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    seen = set()
    for heads in _HEADS:
        for model_type, names in getattr(auto, heads, {}).items():
            name = names if isinstance(names, str) else names[0]
            if model_type in configs and name not in seen:
                seen.add(name)
                yield Entry(f"transformers:{name}", partial(_small_transformer, name, configs[model_type]))


def _small_transformer(name: str, config_name: str) -> tuple[torch.nn.Module, Loss]:
    transformers = importlib.import_module("transformers")
    config = _small_config(getattr(transformers, config_name))
    model = getattr(transformers, name)(config)
    inputs = _transformer_inputs(model, config)
    return _bounded(model), partial(_loss_of, inputs)


def _small_config(kind: type) -> Any:
    accepted = {**getattr(kind, "__dataclass_fields__", {}), **inspect.signature(kind).parameters}
    given = {name: size for name, size in _SIZES.items() if name in accepted}
    try:
        config = kind(**given)
    except Exception:  # a size that this config wants to be otherwise
        config = kind()
        for name, size in given.items():
            setattr(config, name, size)
    for name, value in list(vars(config).items()):
        if name.endswith("config") and hasattr(value, "to_dict") and value is not config:
            setattr(config, name, _small_config(type(value)))
        elif name in {"depths", "num_blocks", "layers_per_block"} and isinstance(value, (list, tuple)):
            setattr(config, name, [1] * len(value))
        elif name in _NO_TOKENS and isinstance(value, int) and value >= _SIZES["vocab_size"]:  # type: ignore[operator]
            setattr(config, name, 1)
    config._attn_implementation = "eager"
    return config


def _transformer_inputs(model: Any, config: Any) -> dict[str, Any]:
    wanted = inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    words = min(getattr(text, "vocab_size", None) or 99, 99)
    size = getattr(vision, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(vision, "num_channels", None) or 3
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: torch.randint(2, words, (2, 12)),
        "decoder_input_ids": lambda: torch.randint(2, words, (2, 7)),
        "pixel_values": lambda: torch.randn(2, channels, height, width),
        "input_values": lambda: torch.randn(2, 3200),
        "input_features": lambda: torch.randn(
            2, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 64)
        ),
        "bbox": lambda: torch.zeros(2, 12, 4, dtype=torch.long),
    }
    inputs = {name: make() for name, make in makers.items() if name in wanted}
    if not inputs:
        raise CannotBuildError(f"inputs: {', '.join(wanted)}")
    if "ForCTC" in type(model).__name__:
        inputs["labels"] = torch.randint(1, words, (2, 4))
    elif "input_ids" in inputs and ("CausalLM" in type(model).__name__ or "MaskedLM" in type(model).__name__):
        inputs["labels"] = inputs["input_ids"]
    if "use_cache" in wanted:
        inputs["use_cache"] = False
    return inputs


def _timm() -> Iterator[Entry]:
    timm = importlib.import_module("timm")
    registry = importlib.import_module("timm.models._registry")
    for module in timm.list_modules():
        names = sorted(registry.list_models(module=module), key=lambda name: (not _is_small(name), name))
        for name in names[:2]:
            yield Entry(f"timm:{name}", partial(_timm_model, name))


def _is_small(name: str) -> bool:
    return any(part in name for part in ("atto", "femto", "pico", "nano", "tiny", "mini", "small", "18", "_s", "xx"))


def _timm_model(name: str) -> tuple[torch.nn.Module, Loss]:
    timm = importlib.import_module("timm")
    model = timm.create_model(name, pretrained=False, num_classes=10)
    size = model.default_cfg.get("min_input_size") or model.default_cfg["input_size"]
    if model.default_cfg.get("fixed_input_size"):
        size = model.default_cfg["input_size"]
    side = size[1] if model.default_cfg.get("fixed_input_size") else max(size[1], 64)
    return _bounded(model), partial(_loss_of, {"": torch.randn(2, 3, side, side)})


def _torchvision() -> Iterator[Entry]:
    models = importlib.import_module("torchvision.models")
    for name in models.list_models(module=models):
        yield Entry(f"torchvision:{name}", partial(_torchvision_model, models, name))


def _make_torchvision_importable() -> None:
    """Have torchvision, which the others import, too, load beside a torch that its operators are not built for."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:  # it registers fake kernels of operators that could not be loaded
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _STUBS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchvision_model(models: Any, name: str) -> tuple[torch.nn.Module, Loss]:
    side = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit", "alexnet", "vgg")) else 64
    return _bounded(models.get_model(name, weights=None)), partial(_loss_of, {"": torch.randn(2, 3, side, side)})


def _bounded(model: torch.nn.Module) -> torch.nn.Module:
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > _LARGEST:
        raise CannotBuildError(f"{size:,} parameters")
    return model.train()


def _loss_of(inputs: dict[str, Any], model: torch.nn.Module) -> torch.Tensor:
    outputs = model(*inputs.values()) if "" in inputs else model(**inputs)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    terms = [value.float().pow(2).mean() for value in _tensors_of(outputs) if value.requires_grad]
    if not terms:
        raise CannotBuildError("no output has a graph")
    return torch.stack(terms).sum()


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_of(one)
