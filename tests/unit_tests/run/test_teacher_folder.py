import pytest

from tests.parts.algorithm import algorithm_of
from tests.parts.tiny import DIMENSIONS, save_tiny_checkpoint, tiny_spec
from torchtitan_rl.algorithm.losses.distillation import Distill, ExactDistill
from torchtitan_rl.command.registry import load_config
from torchtitan_rl.configs.toys.small_tokenizer import make_small_tokenizer
from torchtitan_rl.errors import UserError
from torchtitan_rl.models.hf_config import small_qwen3
from torchtitan_rl.run.teacher_folder import check_same_vocabulary, prepare_teachers
from torchtitan_rl.validation import check_teacher


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


def test_a_teacher_and_a_loss_that_learns_from_one_need_each_other():
    config = load_config("debug_distill")
    check_teacher(config, algorithm_of(config).policy_loss)
    config.teacher = ""
    with pytest.raises(UserError, match="teacher = '': expected a model, from which the loss ExactDistill learns"):
        check_teacher(config, algorithm_of(config).policy_loss)
    config = load_config("debug")
    check_teacher(config, algorithm_of(config).policy_loss)
    config.teacher = "somewhere"
    with pytest.raises(UserError, match="teacher = 'somewhere': expected none, as the loss Clip"):
        check_teacher(config, algorithm_of(config).policy_loss)


def test_a_hint_stands_for_a_teacher_where_the_policy_teaches_itself():
    config = load_config("debug_distill")
    config.teacher, config.teacher_hint = "", "expected_answer"
    check_teacher(config, algorithm_of(config).policy_loss)
    assert config.teaches_itself
    config.sampling.top_p = 0.9
    with pytest.raises(UserError, match="teacher_hint = 'expected_answer': expected none with sampling.top_p"):
        check_teacher(config, algorithm_of(config).policy_loss)
    config = load_config("debug")
    config.teacher_hint = "expected_answer"
    with pytest.raises(UserError, match="teacher_hint = 'expected_answer': expected none, as the loss Clip"):
        check_teacher(config, algorithm_of(config).policy_loss)


@pytest.mark.parametrize(("loss", "teacher"), [(ExactDistill.Config(), "one"), (Distill.Config(), "")])
def test_several_teachers_need_a_first_one_and_sampled_tokens(loss, teacher):
    config = load_config("debug_distill")
    config.algorithm.loss, config.teacher, config.teacher_hint = loss, teacher, "expected_answer"
    config.more_teachers = {"code": "two"}
    with pytest.raises(UserError, match="more_teachers = {'code': 'two'}: expected none without teacher"):
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
