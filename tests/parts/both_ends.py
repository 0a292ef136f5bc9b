"""The link between trainers and generators, with both ends in one process."""

import pickle

from torchtitan_rl.generator_rank import GeneratorRank
from torchtitan_rl.link import Order
from torchtitan_rl.sampler import Sampler


class BothEnds:
    """An order is carried out when its answer is awaited."""

    def __init__(self, generator, lora=None) -> None:
        self.rank = GeneratorRank(self, Sampler(generator, None, None, None), lora, None, lambda: 0)
        self.orders, self.sent = [], []

    def order(self, order) -> None:
        self.orders.append(pickle.loads(pickle.dumps(order)))

    def answer(self):
        order = self.orders[-1]
        value = getattr(self.rank, order.method)(**order.arguments)
        assert self.sent == []  # all has been received
        return pickle.loads(pickle.dumps(value))

    def call(self, step, method, **arguments):
        self.order(Order(step, method, arguments))
        return self.answer()

    def send(self, blocks) -> None:
        self.sent.append([{name: tensor.detach().clone() for name, tensor in block.items()} for block in blocks])

    def receive(self):
        yield from self.sent.pop(0)
