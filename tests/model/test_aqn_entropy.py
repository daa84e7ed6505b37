"""What zero-mean noise does to entropy, in float64: why noise on the norms must be measured, not assumed to explore.

For p = softmax(x), entropy H(x) is concave at its maximum, so zero-mean noise on uniform logits lowers the mean
entropy, by 1/2 tr(Hessian Sigma) to second order. Elsewhere the same formula holds with either sign.
"""

import math

import pytest
import torch

from qerl.kernels import philox

SAMPLES = 200_000


def entropy(logits):
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def noise(classes, sigma, stream):
    """Zero-mean by construction: every draw comes with its negative."""
    half = philox.normal(0, stream, SAMPLES // 2 * classes).double().view(-1, classes) * sigma
    return torch.cat((half, -half))


@pytest.mark.parametrize("classes", [2, 5, 17])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
def test_zero_mean_noise_at_uniform_logits_lowers_mean_entropy(classes, sigma):
    samples = entropy(noise(classes, sigma, "uniform"))
    standard_error = samples.std() / math.sqrt(SAMPLES)
    assert samples.mean() + 5 * standard_error < math.log(classes)


def test_hessian_at_uniform_logits_is_the_negative_centering_matrix():
    n = 6
    hessian = torch.autograd.functional.hessian(entropy, torch.zeros(n, dtype=torch.float64))
    expected = -(torch.eye(n, dtype=torch.float64) - 1 / n) / n
    torch.testing.assert_close(hessian, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("logits", [(0.0, 0.0, 0.0), (2.0, 0.0, -1.0), (4.0, 0.0, 0.0), (6.0, 1.0, 0.5)])
def test_half_the_trace_of_hessian_times_covariance_agrees_with_sampling(logits):
    x = torch.tensor(logits, dtype=torch.float64)
    mixing = torch.tensor([[1.0, 0.3, 0.0], [0.0, 0.8, -0.4], [0.2, 0.0, 0.5]], dtype=torch.float64)
    sigma = 0.05
    drawn = noise(3, sigma, "trace") @ mixing.T
    covariance = sigma**2 * mixing @ mixing.T
    predicted = 0.5 * torch.trace(torch.autograd.functional.hessian(entropy, x) @ covariance)
    change = entropy(x + drawn) - entropy(x)
    measured = change.view(2, -1).mean(0)  # pairs: the first order cancels within each
    standard_error = float(measured.std() / math.sqrt(SAMPLES // 2))
    assert abs(float(measured.mean() - predicted)) < 5 * standard_error + 0.01 * abs(float(predicted))


def test_noise_raises_mean_entropy_of_a_confident_distribution():
    x = torch.tensor([6.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert entropy(x + noise(4, 0.5, "confident")).mean() > entropy(x)
