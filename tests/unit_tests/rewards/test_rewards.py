"""The library of rewards, each on what it should like and not like; the judge against a server on this machine."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from tests.parts.grading import grader, group, logged, rewards, score
from torchtitan_rl.configs.toys.sum_digits import SumDigits
from torchtitan_rl.rewards import (
    Judge,
    RewardError,
    boxed,
    exact_match,
    json_object,
    length,
    math_answer,
    numeric,
    regex,
    repetition,
    script,
    tags,
)


def of(function, *texts, expected="46"):
    return rewards(score(grader(function), *texts, expected_answer=expected))


def test_answers_are_compared_as_text_number_or_math():
    assert of(exact_match, "The answer is  New  york", "york", expected="new York") == [1.0, 0.0]
    assert of(numeric, "#### 1,250.50", "it is 2501/2", "1250", "none", expected="1250.5") == [1.0, 1.0, 0.0, 0.0]
    assert of(numeric, "1/0", expected="1") == [0.0]
    assert of(numeric, "4", expected="four") == [None]
    assert of(math_answer, r"$\boxed{\frac{2}{4}}$", "0.5", "3", expected=r"\frac{1}{2}") == [1.0, 1.0, 0.0]


def test_format_rewards():
    assert of(boxed, r"\boxed{1}", r"\boxed{}", r"\boxed{1} \boxed{2}", "1") == [1.0, 0.0, 0.0, 0.0]
    assert of(boxed, r"\fbox{1}", r"\boxed {1}", r"\fbox{1} \boxed{2}") == [1.0, 1.0, 0.0]
    assert of(boxed, r"<think>\boxed{1}</think>\boxed{2}", r"<think>\boxed{1}") == [1.0, 0.0]
    assert of(math_answer, "", "1", expected=" ") == of(exact_match, "", "1", expected="") == [None, None]
    good = "<think>\na\n</think>\n<answer>b</answer>"
    assert of(tags(["think", "answer"]), good, good + "!", "<answer>b</answer>", "<think><think>a</think></think>") == [
        1.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    assert of(tags(["a.b"]), "<a.b>1</a.b>", "<axb>1</axb>") == [1.0, 0.0]
    objects = ['{"a": 1}', '```json\n{"a": 1}\n```', '{"b": 1}', "[1]", "{"]
    assert of(json_object(["a"]), *objects) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert of(regex(r"a.b"), "xa\nbx", "ab") == [1.0, 0.0]
    assert of(regex(r"a.b", whole=True), "a\nb", "xa\nbx") == [1.0, 0.0]


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "What is 12 + 34?"}]], ids=["text", "chat"])
def test_an_answer_inside_the_thinking_that_the_prompt_opened_earns_nothing(messages):
    """A prompt of Qwen3.5 or R1 ends with <think>; the policy is cut off, or ends its thinking with another answer."""
    seen = []

    def mine(completions, **_):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        seen.extend(texts)
        return [0.0] * len(texts)

    functions = [exact_match, numeric, math_answer, boxed, tags(["answer"]), SumDigits.Config().build().correct, mine]
    ends = ("\\boxed{46}", "<answer>46</answer>", "#### 46", "[ANSWER] 46", "46")
    asked = {"messages": messages, "text": "What is 12 + 34?\n<|im_start|>assistant\n<think>\n"}
    graded = grader(*functions, in_process=["mine"])
    for end in ends:
        cut_off, closed, wrong = score(graded, end, f"Hm.</think>{end}", f"{end}?</think>No idea.", **asked)
        assert max(*cut_off.reward_breakdown.values(), *wrong.reward_breakdown.values()) == 0.0
        assert cut_off.correct is wrong.correct is False
        assert closed.reward_breakdown["exact_match"] == float(end != "[ANSWER] 46")
        assert closed.correct == (end == "[ANSWER] 46")
        assert seen[-3:] == [end, f"Hm.</think>{end}", f"{end}?</think>No idea."]  # a user's function: as written
    [spoken] = score(graded, "[ANSWER] 46", **asked | {"text": "Put your thoughts in <think>. What is 12 + 34?\n"})
    assert spoken.correct


def test_length_repetition_and_script_rewards():
    assert of(length(4), "abcd", "ab", "", "a" * 20) == [0.0, -0.5, -1.0, -1.0]
    assert repetition(2)(completion_ids=[[1, 2, 1, 2, 1], [1, 2, 3], [1]]) == [-0.5, 0.0, 0.0]
    assert of(script("latin"), "abc", "abжд", "123") == [1.0, 0.5, None]
    assert of(script("cjk"), "中a") == [0.5]
    with pytest.raises(ValueError, match="'klingon' is no script"):
        script("klingon")


@pytest.fixture
def server():
    """A judge that marks by the answer's length, after a while, and fails the first time it sees "twice"; what it was asked, and how
    many requests were open."""
    asked, started, stop = [], threading.Event(), []
    now_open, most_open = [], [0]
    address = []

    async def complete(request):
        question = (await request.json())["messages"][0]["content"]
        asked.append(question)
        answer = question.partition("Answer:\n")[2].partition("\n")[0]
        if answer == "twice" and sum("Answer:\ntwice" in one for one in asked) == 1:
            return web.json_response({}, status=503, headers={"retry-after-ms": "10"})
        now_open.append(answer)
        most_open.append(len(now_open))
        await asyncio.sleep(20 if answer == "slow" else 0.5)
        now_open.remove(answer)
        said = "I cannot say" if answer == "mute" else f"Reasons.\nMark: {len(answer)}"
        said = answer if answer.startswith("Mark: ") else said
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1")
        stop.append((asyncio.get_running_loop(), asyncio.Event()))
        started.set()
        await stop[0][1].wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    started.wait(10)
    yield address[0], asked, most_open
    stop[0][0].call_soon_threadsafe(stop[0][1].set)


def test_judge_requests_are_concurrent_and_never_repeated(server, tmp_path):
    address, asked, most_open = server
    cache = tmp_path / "marks.jsonl"
    graded = grader(Judge(address, "m", cache=str(cache)))
    groups = [group("ab", "twice", "x" * i, prompt_idx=i) for i in range(1, 9)]
    scored = graded.grade(groups)
    assert max(most_open) >= 8
    assert [rewards(g.samples) for g in scored] == [[0.2, 0.5, i / 10] for i in range(1, 9)]
    count = len(asked)
    assert count == 10 + 1  # ten different questions, one of them tried again
    graded.grade(groups)
    grader(Judge(address, "m", cache=str(cache))).grade(groups)
    assert len(asked) == count
    assert len([json.loads(line) for line in cache.read_text().splitlines()]) == 10


def test_judge_over_its_budget_is_left_out(server):
    graded = grader(Judge(server[0], "m", budget=2))
    [scored] = graded.grade([group("a", "bb", "ccc", "a")])
    assert rewards(scored.samples) == [0.1, 0.2, None, 0.1]
    assert logged(graded)["extra/Judge/left_out"].value == 0.25


def test_judge_without_a_score_or_over_time_counts_as_failure(server):
    with pytest.raises(RewardError, match="Judge.*the judge gave no mark: 'I cannot say'"):
        score(grader(Judge(server[0], "m")), "mute")
    with pytest.raises(RewardError, match="Judge.*ConnectionError: http.* does not answer: Request timed out"):
        score(grader(Judge(server[0], "m", timeout_seconds=0.2, retries=0)), "slow")


def test_a_judges_mark_is_read_whole_or_is_a_failure(server):
    marks = ["Mark: 10", "Mark: 7/10", "Mark: 7.5.", "Mark: -2 of 10"]
    assert rewards(score(grader(Judge(server[0], "m")), *marks)) == [1.0, 0.7, 0.75, -0.2]
    for said in ("Mark: 1e-1", "Mark: 1,5", "Mark: 1.2.3", "Mark: 7th"):
        with pytest.raises(RewardError, match=f"Judge.*the judge gave no mark: '{said}'"):
            score(grader(Judge(server[0], "m")), said)
    with pytest.raises(RewardError, match="Judge.*the judge gave 85, and highest is 10: 'Mark: 85'"):
        score(grader(Judge(server[0], "m")), "Mark: 85")


def test_first_group_of_the_pattern_is_the_mark(server):
    judge = Judge(server[0], "m", mark=r"Mark: (\d+)(/10)?")
    assert rewards(score(grader(judge), "Mark: 7/10", "Mark: 3")) == [0.7, 0.3]
