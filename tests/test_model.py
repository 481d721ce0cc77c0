"""The model against an independent implementation, and its sharded form against the whole one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ridethrough.config import SIZES, JobConfig
from ridethrough.job.model import Transformer, build_model, initialise, next_token_loss
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks

CONFIG = JobConfig(size="tiny", seq_len=16)


def whole_model(config: JobConfig = CONFIG) -> Transformer:
    model = Transformer(config)
    initialise(model, config)
    return model


def tokens(batch: int = 6) -> Tensor:
    return torch.randint(0, 256, (batch, CONFIG.seq_len + 1), generator=torch.Generator().manual_seed(1))


def reference_loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
    """The same transformer written out with complex rotations and explicit attention."""
    layers, width, heads = SIZES[CONFIG.size]
    inputs, targets = batch[:, :-1], batch[:, 1:]
    time, size = inputs.shape[1], width // heads

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)

    def turn(x: Tensor) -> Tensor:
        position = torch.arange(time, dtype=torch.float32)[:, None]
        angle = position / 10_000 ** (torch.arange(size // 2, dtype=torch.float32) * 2 / size)
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["embedding.weight"][inputs]
    causal = torch.full((time, time), -math.inf).triu(1)
    for layer in range(layers):
        w = {k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items()}
        y = norm(x, w["attention_norm.weight"])
        q, k, v = (
            (y @ part.T).view(-1, time, heads, size).transpose(1, 2)
            for part in w["attention.qkv.weight"].chunk(3)
        )
        scores = (turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(size) + causal).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).reshape(x.shape) @ w["attention.out.weight"].T
        y = norm(x, w["feed_forward_norm.weight"])
        gate = y @ w["feed_forward.gate.weight"].T
        hidden = gate * torch.sigmoid(gate) * (y @ w["feed_forward.up.weight"].T)
        x = x + hidden @ w["feed_forward.down.weight"].T
    logits = norm(x, weights["norm.weight"]) @ weights["head.weight"].T
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def test_loss_and_gradients_equal_the_reference() -> None:
    model, batch = whole_model(), tokens()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ours, theirs = next_token_loss(model, batch), reference_loss(weights, batch)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)


def test_it_cannot_see_the_future() -> None:
    model, batch = whole_model(), tokens()
    before = model(batch[:, :-1])
    batch[:, 10] = (batch[:, 10] + 1) % 256
    after = model(batch[:, :-1])
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    assert next_token_loss(whole_model(), tokens(16)).item() == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_can_be_built(size: str) -> None:
    with torch.device("meta"):
        model = Transformer(JobConfig(size=size))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters <= 1e6 if size == "tiny" else parameters > 1e6


def sharded() -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model(CONFIG, init_device_mesh("cpu", (ranks,)))
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" for p in model.parameters())
    loss = next_token_loss(model, tokens().chunk(ranks)[rank])
    loss.backward()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    return {
        "rotary": model.rotary,
        **{name: p.full_tensor().detach() for name, p in model.named_parameters()},
        **{f"{name}.grad": p.grad.full_tensor() for name, p in model.named_parameters()},
        "loss": mean,
    }


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_model_equals_the_whole_one(ranks: int) -> None:
    """Weights and buffers to the byte, so no garbage of the meta device is left; gradients to rounding."""
    model = whole_model()
    loss = next_token_loss(model, tokens())
    loss.backward()
    for result in run_ranks(ranks, sharded):
        assert torch.equal(result["rotary"], model.rotary)
        torch.testing.assert_close(result["loss"], loss.detach())
        for name, parameter in model.named_parameters():
            assert torch.equal(result[name], parameter), name
            torch.testing.assert_close(result[f"{name}.grad"], parameter.grad, msg=name)
