"""Words for messages: ops by the names that users type, nouns with their article.

In: an op, a method's name, a noun. Out: words for reports, warnings and errors. An op keeps its
aten name if a user would search for that. Ops that nobody calls by their own name stand in
`USERS_NAMES`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch._ops import OpOverload

USERS_NAMES = {
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d()",
    "_conj": ".conj()",
    "_ctc_loss": "ctc_loss()",
    "_cudnn_rnn": "torch.nn.LSTM, GRU or RNN",
    "_embedding_bag": "embedding_bag()",
    "_embedding_bag_forward_only": "embedding_bag()",
    "_linalg_check_errors": "torch.linalg's check for errors",
    "_local_scalar_dense": ".item()",
    "_log_softmax": "log_softmax()",
    "_native_batch_norm_legit": "batch_norm()",
    "_pack_padded_sequence": "pack_padded_sequence()",
    "_pin_memory": ".pin_memory()",
    "_reshape_alias": ".reshape()",
    "_softmax": "softmax()",
    "_to_copy": ".to()",
    "_to_dense": ".to_dense()",
    "_to_sparse": ".to_sparse()",
    "_unique": "unique()",
    "_unique2": "unique()",
    "_unsafe_index": "indexing",
    "_unsafe_index_put": "indexing",
    "_unsafe_view": ".view()",
    "mkldnn_rnn_layer": "torch.nn.LSTM",
    "rnn_layer": "torch.nn.LSTM",
    "rnn_layer_inference": "torch.nn.LSTM",
    **dict.fromkeys(
        (
            "_efficient_attention_forward", "_flash_attention_forward",
            "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        "scaled_dot_product_attention()",
    ),
}  # fmt: skip
"""What a user writes to call an aten op, by the op's name. (`float()`, `int()`, `bool()` and
`if tensor` call `.item()`.)"""
CALLED_OTHERWISE = {"index": "indexing", "index_put": "indexing", "index_put_": "indexing"}
"""The same for ops whose own names users know too. Only `call_name` uses these words."""


@cache
def op_name(op: Any) -> str:
    """An op's name in messages: the aten name, or the user's word if users don't know that."""
    return USERS_NAMES.get(_base(op), str(op))


@cache
def call_name(op: Any) -> str:
    """The call by which a user gets an op, such as `.item()` or `nonzero()`."""
    base = _base(op)
    found = USERS_NAMES.get(base) or CALLED_OTHERWISE.get(base)
    if found or not base or base.startswith("_"):
        return found or str(op)
    return f"{base}()"


DISTRIBUTION_CHECK = "a distribution's check"
"""The cause of a flush by `torch.distributions`, which checks the values of its arguments."""
METHODS = {
    "__repr__": "print()", "__array__": ".numpy()", "__deepcopy__": "copy.deepcopy()",
    "__reduce_ex__": "pickle, or torch.save()", "__dlpack__": "DLPack",
}  # fmt: skip


def method_name(name: str) -> str:
    """A method of tensors, written as users call it: `.numpy()`, `float()`, `print()`."""
    if name in METHODS or not name.startswith("__"):
        return METHODS.get(name, f".{name}()")
    return f"{name.strip('_')}()"


def title_of(base: str) -> str:
    """The short name of an aten op in a list of ops: `to` for `_to_copy`."""
    return USERS_NAMES.get(base, base).removeprefix(".").removesuffix("()")


def _base(op: Any) -> str:
    """The name, without overload, of an op of aten or of this package; "" for any other."""
    if isinstance(op, OpOverload) and op.namespace in ("aten", "lazy_tensor"):
        return str(op.__name__.partition(".")[0])
    return ""


def with_article(noun: str) -> str:
    """The noun with its article: `an int`, `a Tensor`."""
    return f"{'an' if noun[:1].lower() in set('aeiou') else 'a'} {noun}"
