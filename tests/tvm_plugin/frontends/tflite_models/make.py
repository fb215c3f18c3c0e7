"""The TFLite models of these tests, made with TensorFlow 2.21, which the tests do not need: `python make.py`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import keras
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent


def image() -> keras.Model:
    """Convolutions of each kind, with what is around them."""
    x = given = keras.Input((10, 10, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    x = keras.layers.ZeroPadding2D(1)(x)
    x = keras.layers.DepthwiseConv2D(3, strides=2)(x)
    x = keras.layers.PReLU(shared_axes=[1, 2])(x)
    x = keras.layers.UpSampling2D(2)(x)
    x = keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = keras.layers.AveragePooling2D(2)(x)
    x = keras.layers.Flatten()(keras.layers.Permute((3, 1, 2))(x))
    return keras.Model(given, keras.layers.Dense(5)(x))


def words() -> keras.Model:
    """A transformer's block."""
    x = given = keras.Input((6, 8))
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4)(x, x))
    hidden = keras.layers.Dense(16)(x)
    gelu = keras.layers.Lambda(lambda value: tf.nn.gelu(value, approximate=True))(hidden)
    return keras.Model(given, x + keras.layers.Dense(8, activation="gelu")(gelu))


def corners() -> keras.Model:
    """Fused activations, rows at the end that no tap needs, a tensor that is an operand twice."""
    given = keras.Input((6, 6, 4))
    enlarged = keras.layers.Conv2DTranspose(3, 1, strides=2, padding="same", activation="relu")(given)
    averaged = keras.layers.Lambda(lambda value: tf.nn.relu6(tf.nn.avg_pool2d(4.0 * value, 2, 2, "VALID")))(given)
    squared = keras.layers.Lambda(lambda value: tf.matmul(value, value, transpose_b=True))(given)
    parts = [keras.layers.Flatten()(part) for part in (enlarged, averaged, squared)]
    return keras.Model(given, keras.layers.Concatenate()(parts))


def steps() -> keras.Model:
    """A loop."""
    return keras.Sequential([keras.Input((4, 3)), keras.layers.SimpleRNN(5)])


def lstm() -> keras.Model:
    """A loop with several states."""
    return keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(5)])


def write(name: str, model: keras.Model, directory: str) -> None:
    """A .tflite file in floats; of some, another one in 8 bits, and of `image` one with such weights."""
    generator = np.random.default_rng(0)
    signature = [tf.TensorSpec((1, *model.inputs[0].shape[1:]), "float32")]
    model.export(directory, input_signature=signature, verbose=False)
    for suffix in {"image": ("", "_int8", "_dynamic"), "words": ("", "_int8"), "corners": ("", "_int8")}.get(
        name, ("",)
    ):
        converter = tf.lite.TFLiteConverter.from_saved_model(directory)
        if suffix:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if suffix == "_int8":
            converter.representative_dataset = lambda: (
                [generator.normal(size=signature[0].shape).astype("float32")] for _ in range(20)
            )
        (HERE / f"{name}{suffix}.tflite").write_bytes(converter.convert())


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    for made in (image, words, corners, steps, lstm):
        with TemporaryDirectory() as folder:
            write(made.__name__, made(), folder)
