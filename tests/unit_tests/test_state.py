import json

from torchtitan_rl.state import RunState


class Part:
    """Something with a state, such as a controller."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_state_dict_restores_counters_and_a_new_part_keeps_its_initial_state():
    saved = RunState(old=Part(3))
    saved.step = 7
    state = saved.state_dict()
    assert isinstance(json.loads(state["json"]), dict)
    resumed = RunState(old=Part(0), new=Part(5))
    resumed.load_state_dict(state)
    assert (resumed.step, resumed.parts["old"].value, resumed.parts["new"].value) == (7, 3, 5)
