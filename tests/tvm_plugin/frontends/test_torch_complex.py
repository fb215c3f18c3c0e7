"""Models that compute with complex numbers, between real inputs and real outputs."""

from __future__ import annotations

from typing import Any

import pytest

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unoptimised
nn = torch.nn

SOUND = torch.sin(torch.linspace(0, 200, 800)).reshape(2, 400)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 10).reshape(2, 3, 8, 10).cos()


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Rotary(nn.Module):
    """As Llama's authors write it: pairs of numbers, turned by a complex factor of their place."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(6)[:, None] * 100.0 ** (-torch.arange(4) / 4)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.query = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        query = self.query(x)
        pairs = torch.view_as_complex(query.float().reshape(*query.shape[:-1], 4, 2))
        return torch.view_as_real(pairs * self.turns).flatten(2)


class SpectralConvolution(nn.Module):
    """As in a Fourier neural operator: few frequencies of an image, each multiplied by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 3, 3, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        spectrum = torch.fft.rfft2(x)
        kept = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], self.weight)
        wide = torch.zeros(x.shape[0], 4, x.shape[2], x.shape[3] // 2 + 1, dtype=kept.dtype)
        wide[:, :, :3, :3] = kept
        return torch.fft.irfft2(wide, s=x.shape[-2:])


def spectrogram(sound: Any, **options: Any) -> Any:
    return torch.stft(sound, 64, 16, window=torch.hann_window(64), return_complex=True, **options)


def turned(x: Any) -> Any:
    return torch.complex(x, 1 - x)


def parts(*values: Any) -> Any:
    return tuple(torch.view_as_real(value) for value in values)


def written(value: Any, x: Any) -> Any:
    value = value.clone()
    value[:, 0] = x[:, 0]
    return value


def sharpened(sound: Any) -> Any:
    """To a spectrogram and back."""
    spectrum = spectrogram(sound)
    size = spectrum.abs()
    return torch.istft(spectrum * (size / (size + 1)), 64, 16, window=torch.hann_window(64), length=400)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Rotary(), (torch.linspace(-1, 1, 96).reshape(2, 6, 8),)),
        (Lambda(lambda x: spectrogram(x).abs()), (SOUND,)),
        (Lambda(lambda x: torch.view_as_real(spectrogram(x, center=False, normalized=True))), (SOUND,)),
        (Lambda(lambda x: torch.view_as_real(spectrogram(x, onesided=False)).square().sum(-1)), (SOUND,)),
        (Lambda(sharpened), (SOUND,)),
        (Lambda(lambda x: torch.fft.fft2(x).real), (IMAGE,)),
        (Lambda(lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * 2j, n=9)), (IMAGE,)),
        (Lambda(lambda x: torch.fft.ifft(torch.fft.fft(x, dim=1), dim=-2, norm="forward").imag), (IMAGE,)),
        (Lambda(lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x[:1]), n=400)), (SOUND,)),
        (Lambda(lambda x: torch.view_as_real(torch.fft.fft(torch.complex(x, x * x))[..., 1:])), (SOUND[:, :243],)),
        (SpectralConvolution(), (IMAGE,)),
        (Lambda(lambda x: torch.angle(torch.complex(x, 1 - x) / torch.complex(x * x + 1, x))), (IMAGE,)),
        (Lambda(lambda x: (torch.exp(1j * x) + x - 2).conj().imag), (IMAGE,)),
        (
            Lambda(lambda x, y: torch.view_as_real((torch.complex(x, y) @ torch.complex(y, x).mT) ** 2)),
            (IMAGE, 2 * IMAGE),
        ),
        (Lambda(lambda x: parts(torch.cat([turned(x), x]), torch.stack([x, turned(x)]))), (IMAGE,)),
        (Lambda(lambda x: parts(torch.where(x > 0, turned(x), x), torch.where(x > 0, 2.0, turned(x)))), (IMAGE,)),
        (Lambda(lambda x: parts(nn.functional.pad(turned(x), (0, 1), value=2), written(turned(x), x))), (IMAGE,)),
        (Lambda(lambda x: parts(torch.select_scatter(turned(x), x[:, 0], 1, 1), turned(x))), (IMAGE,)),
        (Lambda(lambda x: parts(torch.slice_scatter(turned(x), x[:, :1], 1, 1, 2), turned(x))), (IMAGE,)),
        (
            Lambda(lambda x: parts(torch.complex(x, torch.ones(1)), torch.fft.fft(x) * torch.full((10,), 2 - 1j))),
            (IMAGE,),
        ),
    ],
    ids=[
        "rotary",
        "spectrogram",
        "normalized",
        "two-sided",
        "inverse-spectrogram",
        "fnet",
        "ragged-inverse",
        "other-axes",
        "filter",
        "length-of-five-factors",
        "spectral-convolution",
        "quotient",
        "exponential",
        "product",
        "joined-with-real",
        "chosen-or-real",
        "padded-and-written-with-real",
        "selected-real",
        "sliced-real",
        "parts-that-broadcast",
    ],
)
def test_complex_numbers_are_pairs(module: Any, inputs: Any) -> None:
    assert verify_import(load_model(module.eval(), example_inputs=inputs)) < 1e-5


def test_inputs_keep_their_names() -> None:
    imported = load_model(Rotary().eval(), example_inputs=(torch.zeros(1, 6, 8),))
    assert [(info.name, info.shape) for info in imported.inputs] == [("x", (1, 6, 8))]


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (torch.fft.rfft, (IMAGE,), "view_as_real"),
        (lambda x: x.real, (torch.complex(IMAGE, IMAGE),), "view_as_real"),
        (lambda x: torch.fft.rfft(x).abs(), (torch.zeros(1, 10_007),), "10007 points"),
        (lambda x: torch.complex(x, x).log().real, (IMAGE,), "log"),
        (lambda x: (torch.complex(x, x) ** 3).real, (IMAGE,), "power 3"),
    ],
    ids=["complex-output", "complex-input", "long", "unknown", "power"],
)
def test_what_is_refused_is_named(function: Any, inputs: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(Lambda(function), example_inputs=inputs)
