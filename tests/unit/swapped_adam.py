"""One optimizer twice, swapped and in memory, driven as ZeRO-3 drives it: sub-group by sub-group."""

from types import SimpleNamespace

import torch

from offload.config import AioConfig
from offload.swap import PartitionedOptimizerSwapper, PipelinedOptimizerSwapper
from offload.swap.sub_group import MASTER

torch.set_num_threads(1)  # small tensors, many tests: threads only wait for each other

MIB = 1 << 20
NUMEL = MIB // 4
"""Elements of the smallest sub-group that swaps."""


def config(**values):
    defaults = {"buffer_count": 4, "pin_memory": False, "pipeline_read": True, "pipeline_write": True}
    return SimpleNamespace(**{**defaults, **values})


class SwappedAdam:
    """AdamW over flat sub-groups of `numels` elements in a swapper, and the same in memory as the truth."""

    def __init__(
        self, folder, numels, kind=PartitionedOptimizerSwapper, optimizer=torch.optim.AdamW, **values
    ):
        self.generator = torch.Generator().manual_seed(1)
        self.truth = [self._randn(numel).requires_grad_() for numel in numels]
        self.params = [torch.empty(0).requires_grad_() for _ in numels]
        for index, param in enumerate(self.params):
            param.ds_id = f"{index}_{index}"
        options = {"lr": 0.1, **({"amsgrad": True} if optimizer is torch.optim.AdamW else {})}
        self.reference = optimizer(self.truth, **options)
        self.optimizer = optimizer(self.params, **options)
        self.swapper = kind(
            swap_config=config(**values),
            aio_config=AioConfig(),
            base_folder=str(folder),
            optimizer=self.optimizer,
            largest_numel=max(numels),
            device="cpu",
            dtype=torch.float32,
            timers=None,
        )
        self.swapper.initialize_parameters(self.params, [truth.detach() for truth in self.truth])

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.swapper.close()

    def _randn(self, numel):
        return torch.randn(numel, generator=self.generator)

    def backward(self, dtype=torch.bfloat16, parts=3):
        """Hands over one gradient per sub-group, in parts as a model's parameters make them."""
        self.swapper.begin_gradient_window()
        for param, truth in zip(self.params, self.truth, strict=True):
            truth.grad = self._randn(truth.numel()).to(dtype).float()
            pieces = truth.grad.to(dtype).chunk(parts)
            offsets = [sum(piece.numel() for piece in pieces[:index]) for index in range(len(pieces))]
            self.swapper.swap_out_gradients(param, offsets, pieces)

    def step(self):
        """Every sub-group in, stepped, out; then the same in memory."""
        for index, param in enumerate(self.params):
            following = self.params[index + 1] if index + 1 < len(self.params) else None
            self.swapper.swap_in_optimizer_state(param, following)
            self._step_only(param)
            self.swapper.swap_out_optimizer_state(param, async_swap=following is not None)
            param.grad = None
        self.reference.step()

    def train(self, nsteps, **how):
        for _ in range(nsteps):
            self.backward(**how)
            self.step()

    def _step_only(self, param):
        """As ZeRO-3: the optimizer sees one sub-group at a time."""
        (group,) = self.optimizer.param_groups
        group["params"] = [param]
        try:
            self.optimizer.step()
        finally:
            group["params"] = self.params

    def values(self, index):
        """What the swapper holds of a sub-group: master weights and state."""
        param = self.params[index]
        self.swapper.swap_in_optimizer_state(param)
        state = self.optimizer.state.get(param, {})
        found = {name: value.clone() for name, value in state.items() if torch.is_tensor(value)}
        found[MASTER] = param.detach().clone()
        self.swapper.release_swap_buffers(param)
        return found

    def assert_equal(self):
        """Weights and state of all sub-groups are, bit for bit, those of the optimizer in memory."""
        for index, truth in enumerate(self.truth):
            expected = {**self.reference.state.get(truth, {}), MASTER: truth.detach()}
            found = self.values(index)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"{name} of sub-group {index}"


KINDS = (PartitionedOptimizerSwapper, PipelinedOptimizerSwapper)
