"""A taskset of verifiers: spell a word backwards."""

import verifiers.v1 as vf

__all__ = ["Words"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def backwards(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.word[::-1])

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(self.data.word))


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("anchor", "bridge", "candle", "dragon"):
            yield WordTask(WordData(prompt=f"Spell {word} backwards.", word=word))
