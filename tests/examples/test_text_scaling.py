"""The reviews, the model and the training script of the distributed-training study."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

Script = Callable[[str], ModuleType]
FOLDER = Path(__file__).parents[2] / "examples" / "text_scaling"


@pytest.fixture
def reviews(script: Script) -> ModuleType:
    return script("text_scaling/reviews.py")


@pytest.fixture
def train(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))  # as for a script that runs
    return script("text_scaling/train.py")


# ---- generated reviews


def test_generated_reviews_are_the_same_in_every_process(reviews: ModuleType) -> None:
    first, second = reviews.GeneratedReviews(3), reviews.GeneratedReviews(3)
    assert [first[index] for index in (5, 0, 1 << 40)] == [second[index] for index in (5, 0, 1 << 40)]
    assert first[5] != reviews.GeneratedReviews(4)[5]


def test_generated_reviews_are_balanced_and_fit_the_default_length(reviews: ModuleType) -> None:
    some = [reviews.GeneratedReviews()[index] for index in range(2000)]
    assert sum(review.label for review in some) == pytest.approx(1000, abs=100)
    assert max(len(review.text.split()) for review in some) <= 38  # and [CLS] and [SEP]


def test_generated_label_follows_from_the_words_except_for_mistakes(reviews: ModuleType) -> None:
    generated = reviews.GeneratedReviews()
    strengths = {"very": 3, "slightly": 1}

    def score(text: str) -> int:
        total, words, weight = 0, text.split(), 1
        for number, word in enumerate(words):
            if word in ("but", "and"):
                weight = 2 if word == "but" else 1
            polarity = (word in generated.good) - (word in generated.bad)
            before = words[max(0, number - 2) : number]
            negated = -1 if any(each in generated.NEGATIONS for each in before) else 1
            total += weight * polarity * negated * strengths.get(words[number - 1], 2)
        return total

    some = [generated[index] for index in range(3000)]
    mistakes = sum((score(review.text) > 0) != review.label for review in some)
    assert mistakes / len(some) == pytest.approx(generated.MISTAKES, abs=0.01)


# ---- splits


def test_training_split_has_nine_tenths_and_validation_is_the_same_for_all_sizes(reviews: ModuleType) -> None:
    small, large = (
        {split: reviews.load_split(split, samples=samples, validation_samples=50) for split in ("train", "validation")}
        for samples in (100, 400)
    )
    assert (len(small["train"]), len(large["train"])) == (90, 360)
    texts = [[review.text for review in each["validation"]] for each in (small, large)]
    assert texts[0] == texts[1]
    assert not {review.text for review in large["train"]} & set(texts[1])


def test_text_of_the_training_split_is_left_out_of_validation(reviews: ModuleType, tmp_path: Path) -> None:
    rows = [f'"{1 + index % 2}","title","text {index}"' for index in range(20)]
    rows[9] = '"2","another title","Text  3"'  # differs in letters' case and spaces only
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    train, validation = (reviews.load_split(each, samples=20, data=str(tmp_path)) for each in ("train", "validation"))
    assert len(train) == 18
    assert [review.text for review in validation] == ["text 19"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 15}, "samples is 15, expected a multiple of 10"),
        ({"samples": 0}, "samples is 0, expected a multiple of 10"),
        ({"samples": 20, "validation_samples": 0}, "validation-samples is 0, expected at least 1"),
        ({"samples": 20, "validation_samples": 3, "data": "x.csv"}, "expected 1 to 2, a tenth of 20"),
    ],
)
def test_split_bad_argument_is_named(reviews: ModuleType, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reviews.load_split("train", **arguments)


# ---- files in amazon_polarity's format


def test_original_file_without_header_has_labels_1_and_2(reviews: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"2","Great","He said ""wow"", twice"\n"1","Bad, bad","Two\nlines"\n"1","Unread","?"\n')
    file = reviews.ReviewFile(path, 2)
    assert len(file) == 2
    assert [file[index] for index in (1, 0)] == [
        reviews.Review("Two\nlines", 0),
        reviews.Review('He said "wow", twice', 1),
    ]


def test_file_may_begin_with_a_byte_order_mark_without_a_header(reviews: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"2","Great","good"\n"1","Bad","bad"\n', encoding="utf-8-sig")
    file = reviews.ReviewFile(path, 2)
    assert [file[index] for index in (0, 1)] == [reviews.Review("good", 1), reviews.Review("bad", 0)]


def test_file_with_header_has_labels_0_and_1(reviews: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("label,title,content\n1,Great,good é\n0,Bad,bad\n", encoding="utf-8-sig")
    file = reviews.ReviewFile(path, 2)
    assert [file[index] for index in (0, 1)] == [reviews.Review("good é", 1), reviews.Review("bad", 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"1","a","b"\n', "has 1 reviews, expected at least 2: lower --samples"),
        ('"1","a","b"\n"1","a","c"\n', "has the labels 1 in its first 2 records, expected both 0 and 1"),
        ('"1","a","b"\n"5","a","c"\n', "has the labels 1, 5 in"),
        ('"1","a","b\n"2","a","c"\n', "ends inside a quotation"),
        ('"1","a","b"\n\n"2","a","c"\n', "has an empty line between its records"),
        ('"1","a","' + "b" * (1 << 20) + '"\n', "a record of more than 1,048,576 bytes: is a quotation not closed?"),
    ],
)
def test_file_that_is_not_as_described_is_rejected(
    reviews: ModuleType, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "train.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        reviews.ReviewFile(path, 2)


def test_record_without_three_fields_is_named(reviews: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"1","a","b"\n"2","c"\n')
    with pytest.raises(ValueError, match=r"train\.csv, record 2: expected label, title, content"):
        reviews.ReviewFile(path, 2)[1]


# ---- tokens


def test_tokenizer_has_the_most_frequent_words_and_one_length(reviews: ModuleType) -> None:
    tokenizer = reviews.make_tokenizer(["b a, a", "B c d"], vocabulary=8, max_length=6)
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [*reviews.SPECIAL_TOKENS, "a", "b", ","]
    encoding = tokenizer.encode("A c b")
    assert encoding.tokens == ["[CLS]", "a", "[UNK]", "b", "[SEP]", "[PAD]"]
    assert encoding.attention_mask == [1, 1, 1, 1, 1, 0]
    assert tokenizer.encode("a a a a a a").tokens == ["[CLS]", "a", "a", "a", "a", "[SEP]"]


def test_vocabulary_knows_no_validation_text(train: ModuleType, reviews: ModuleType, tmp_path: Path) -> None:
    rows = [f'"{1 + index % 2}","t","{"held" if index % 10 == 9 else "shown"} {index % 9}"' for index in range(40)]
    path = tmp_path / "train.csv"
    path.write_text("\n".join(rows) + "\n")
    tokenizer = train.sentiments.function("validation", 40, None, 100, 8, str(path)).tokenizer
    assert "shown" in tokenizer.get_vocab()
    assert "held" not in tokenizer.get_vocab()


# ---- model, schedule, score


def test_full_size_has_the_parameters_that_the_source_states(train: ModuleType, script: Script) -> None:
    with torch.device("meta"):
        model = train.make_model("full")
    published = script("text_scaling/published.py")
    assert train.count_parameters(model) == train.FULL_SIZE_PARAMETERS == published.NUM_PARAMETERS
    encoder = sum(each.numel() for name, each in model.named_parameters() if name.startswith("distilbert."))
    assert encoder == published.NUM_ENCODER_PARAMETERS


def test_pretrained_folder_gives_weights_and_tokenizer(train: ModuleType, reviews: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = train.make_model("small")
    saved.save_pretrained(tmp_path)
    reviews.make_tokenizer(["good bad"], vocabulary=10, max_length=4).save(str(tmp_path / "tokenizer.json"))
    loaded = train.make_model("full", str(tmp_path))
    assert loaded.training
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    sample = train.sentiments.function("train", 20, None, 10, 6, None, str(tmp_path))[0]
    assert {name: tuple(tensor.shape) for name, tensor in sample.items()} == {
        "input_ids": (6,),
        "attention_mask": (6,),
        "labels": (),
    }
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        reviews.read_tokenizer(str(tmp_path / "none"), max_length=6)


def test_learning_rate_rises_then_falls_to_zero(train: ModuleType) -> None:
    factors = [train.learning_rate_factor(step, num_steps=10, warm_up_steps=2) for step in range(11)]
    assert factors == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    assert train.learning_rate_factor(0, num_steps=10, warm_up_steps=0) == 1


def test_f1_and_accuracy_are_those_of_scikit_learn(train: ModuleType) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    predicted, actual = torch.randint(0, 2, (2, 200), generator=torch.Generator().manual_seed(0))
    f1, accuracy = train.scores(*train.confusion(predicted, actual).tolist())
    assert f1 == pytest.approx(metrics.f1_score(actual, predicted))
    assert accuracy == pytest.approx(metrics.accuracy_score(actual, predicted))
    assert train.scores(0, 0, 5, 0) == (0.0, 1.0)


def test_warm_up_is_not_on_by_default_in_transformers() -> None:
    """The source states the opposite."""
    import transformers

    assert transformers.TrainingArguments.__dataclass_fields__["warmup_steps"].default == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "--epochs is 0, expected at least 1"),
        (["--warm-up", "2"], "--warm-up is 2.0, expected a"),
        (["--samples", "15"], "--samples is 15, expected a multiple of 10, at least 10"),
        (["--samples", "-10"], "--samples is -10, expected a multiple of 10, at least 10"),
        (["--validation-samples", "0"], "--validation-samples is 0, expected at least 1"),
        (["--samples", "20", "--data", "x", "--validation-samples", "3"], "expected 1 to 2, a tenth of 20"),
        (["--learning-rate", "nan"], "--learning-rate is nan, expected a finite number above 0"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0, expected a finite number above 0"),
        (["--max-length", "2"], "--max-length is 2, expected at least 3"),
        (["--num-workers", "-1"], "--num-workers is -1, expected at least 0"),
    ],
)
def test_command_line_bad_value_is_named(
    train: ModuleType, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.parse_arguments(flags)
    assert message in capsys.readouterr().err


def test_command_line_defaults_are_whole_epochs(train: ModuleType) -> None:
    args: argparse.Namespace = train.parse_arguments([])
    assert math.remainder(0.9 * args.samples, args.batch_size) == 0
