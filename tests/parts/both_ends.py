"""The link between trainers and generators, with both ends in one process."""

import pickle

from torchtitan_rl.link import Order
from torchtitan_rl.sync.other_ranks import OrderedEngine


class BothEnds:
    """An order is carried out when its answer is awaited."""

    def __init__(self, generator, lora=None) -> None:
        self.parts, self.orders, self.sent = {"engines": OrderedEngine(self, generator, lora)}, [], []

    def order(self, order) -> None:
        self.orders.append(pickle.loads(pickle.dumps(order)))

    def answer(self):
        order = self.orders[-1]
        value = getattr(self.parts[order.part], order.method)(**order.arguments)
        assert self.sent == []  # all has been received
        return pickle.loads(pickle.dumps(value))

    def call(self, step, part, method, **arguments):
        self.order(Order(step, part, method, arguments))
        return self.answer()

    def send(self, tensors) -> None:
        self.sent.append([(name, tensor.detach().clone()) for name, tensor in tensors])

    def receive(self):
        yield from self.sent.pop(0)
