"""BERT-base: Devlin et al., "BERT: Pre-training of deep bidirectional transformers", NAACL 2019.

Tensat's BERT: the attention stack of TASO's and Tensat's benchmark (`examples/bert.py`, `src/bert.rs`), kept as it is
there: no softmax, no scaling, no transposed keys, and the next layer takes the linear map of this layer's input.
"""

from __future__ import annotations

from ..errors import InputError
from .builder import H, Network, Tensor

__all__ = ["bert_base", "tensat_bert"]

_LAYERS = 12
_HEADS = 12
_WIDTH = 768
_FEED_FORWARD = 3072
_VOCABULARY = 30522
_POSITIONS = 512
_SEGMENTS = 2
_EPSILON = 1e-12
_LINEAR = 1.0  # gain of layers whose input was not rectified


def _attention(net: Network[H], x: Tensor[H], name: str) -> Tensor[H]:
    batch, length, width = x.shape

    def heads(part: str) -> Tensor[H]:
        projected = net.linear(x, f"{name}.{part}", width, gain=_LINEAR)
        return net.reshape(projected, batch, length, _HEADS, width // _HEADS)

    context = net.attention(heads("query"), heads("key"), heads("value"))
    return net.linear(net.reshape(context, batch, length, width), f"{name}.output", width, gain=_LINEAR)


def _layer(net: Network[H], x: Tensor[H], name: str) -> Tensor[H]:
    attended = net.add(_attention(net, x, f"{name}.attention"), x)
    x = net.layer_norm(attended, f"{name}.attention.norm", epsilon=_EPSILON)
    hidden = net.gelu(net.linear(x, f"{name}.intermediate", _FEED_FORWARD, gain=_LINEAR))
    out = net.add(net.linear(hidden, f"{name}.output", _WIDTH), x)
    return net.layer_norm(out, f"{name}.norm", epsilon=_EPSILON)


def _embeddings(net: Network[H], length: int) -> Tensor[H]:
    tokens = net.input("input_ids", (1, length), "int64", high=_VOCABULARY)
    segments = net.input("token_type_ids", (1, length), "int64", high=_SEGMENTS)
    words = net.embedding(tokens, "embeddings.words", _VOCABULARY, _WIDTH)
    kinds = net.embedding(segments, "embeddings.segments", _SEGMENTS, _WIDTH)
    table = net.weight("embeddings.positions", (_POSITIONS, _WIDTH), fan_in=1)
    positions = net.slice(table, 0, 0, length)
    return net.layer_norm(net.add(net.add(words, kinds), positions), "embeddings.norm", epsilon=_EPSILON)


def bert_base(net: Network[H], sequence_length: int = 64, token_ids: bool = False) -> list[Tensor[H]]:
    """Embeddings `(1, sequence_length, 768)` -> the last layer's states, of the same shape.

    With `token_ids`, the whole model of the paper: tokens and segments `(1, sequence_length)`, int64, through the
    embeddings, the encoder and the pooler, to the states and the pooled output `(1, 768)`.

    Raises
    ------
    InputError
        With `token_ids`, there are more tokens than positions.
    """
    if token_ids and sequence_length > _POSITIONS:
        raise InputError(f"sequence_length={sequence_length}, but BERT has positions for up to {_POSITIONS} tokens")
    x = _embeddings(net, sequence_length) if token_ids else net.input("embeddings", (1, sequence_length, _WIDTH))
    for layer in range(_LAYERS):
        x = _layer(net, x, f"layer{layer}")
    if not token_ids:
        return [x]
    first = net.reshape(net.slice(x, 1, 0, 1), 1, _WIDTH)
    return [x, net.tanh(net.linear(first, "pooler", _WIDTH, gain=_LINEAR))]


def tensat_bert(net: Network[H], layers: int = 8, sequence_length: int = 64) -> list[Tensor[H]]:
    """States `(sequence_length, 1024)` -> the attention of each layer, then the last states; 16 heads.

    Tensat joins the outputs by a no-operation to keep all of them; here they are a tuple.
    """
    width, heads = 1024, 16
    x = net.relu(net.input("input", (sequence_length, width)))
    outputs = []

    def project(x: Tensor[H], name: str) -> Tensor[H]:
        return net.matmul(x, net.weight(name, (width, width), width))

    def split_heads(x: Tensor[H]) -> Tensor[H]:
        return net.permute(net.reshape(x, sequence_length, heads, width // heads), 1, 0, 2)

    for layer in range(layers):
        query, key, value = (split_heads(project(x, f"layer{layer}.{part}")) for part in ("query", "key", "value"))
        context = net.permute(net.matmul(net.matmul(query, key), value), 1, 0, 2)
        outputs.append(net.reshape(context, sequence_length, width))
        x = project(x, f"layer{layer}.linear")
    return [*outputs, x]
