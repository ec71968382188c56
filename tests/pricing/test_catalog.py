"""The catalogue: shipped facts, no invented prices, and prices from users."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.pricing import Catalogue, list_text, show_text


def test_catalogue_by_default_has_facts_and_no_price() -> None:
    catalogue = Catalogue.load()
    assert all(info.price is None for info in catalogue.types())
    info = catalogue.get("ml.g5.12xlarge")
    assert (info.vcpus, info.memory_gib, info.num_accelerators, info.accelerator) == (48, 192, 4, "NVIDIA A10G")
    for family in ("c5", "c6i", "c7i", "c8i", "m5", "m8i", "r7i", "g4dn", "g5", "g6", "p3", "p4d", "p5", "trn1"):
        assert any(info.instance_type.startswith(f"ml.{family}.") for info in catalogue.types()), family


@pytest.mark.parametrize(
    ("name", "vcpus", "hourly_usd"),
    [
        ("ml.p4d.24xlarge", 96, 37.688),
        ("ml.c5.18xlarge", 72, 3.672),
        ("ml.p3.2xlarge", 8, 3.825),
        ("ml.c5.9xlarge", 36, 1.836),
    ],
)
def test_seed_profile_has_the_four_published_prices(name: str, vcpus: int, hourly_usd: float) -> None:
    info = Catalogue.load("seed-2022").get(name)
    assert (info.vcpus, info.hourly_usd) == (vcpus, hourly_usd)
    assert info.price is not None
    assert (info.price.region, info.price.as_of) == ("us-east-1", "2022")


def test_seed_profile_has_no_other_price() -> None:
    assert sum(info.price is not None for info in Catalogue.load("seed-2022").types()) == 4
    assert Catalogue.profiles() == ("seed-2022",)


def test_prices_by_flag_beat_file_beat_profile(tmp_path: Path) -> None:
    price_file = tmp_path / "prices.yaml"
    price_file.write_text(
        "as_of: 2026-03-01\nsource: contract\nhourly_usd: {ml.c5.9xlarge: 2, ml.p3.2xlarge: 4}\n", encoding="utf-8"
    )
    catalogue = Catalogue.load("seed-2022", price_file=price_file, overrides=["ml.p3.2xlarge=5", "ml.z9.large=0.5"])
    assert catalogue.get("ml.c5.18xlarge").hourly_usd == 3.672
    from_file = catalogue.get("ml.c5.9xlarge").price
    assert from_file is not None
    assert (from_file.hourly_usd, from_file.as_of, from_file.source) == (2.0, "2026-03-01", "contract")
    assert catalogue.get("ml.p3.2xlarge").hourly_usd == 5.0
    assert catalogue.get("ml.z9.large").vcpus is None  # a type newer than the catalogue can be priced
    assert catalogue.get("ml.z9.large").hourly_usd == 0.5


def test_price_file_in_json_is_read(tmp_path: Path) -> None:
    price_file = tmp_path / "prices.json"
    price_file.write_text('{"region": "eu-west-1", "hourly_usd": {"ml.c5.9xlarge": 1.9}}', encoding="utf-8")
    info = Catalogue.load(price_file=price_file, region="eu-west-1").get("ml.c5.9xlarge")
    assert info.price is not None
    assert (info.price.region, info.price.source) == ("eu-west-1", str(price_file))


@pytest.mark.attack("A22")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "hourly_usd: expected an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"hourly_usd": {"ml.x": 0}}', "hourly_usd.ml.x: found 0"),
        ('{"hourly_usd": {"ml.x": -1}}', "hourly_usd.ml.x: found -1"),
        ('{"hourly_usd": {"ml.x": 1000}}', "below 1000"),
        ('{"hourly_usd": {"ml.x": 1e400}}', "found inf"),
        ('{"hourly_usd": {"ml.x": NaN}}', "found nan"),
        ('{"hourly_usd": {"ml.x": true}}', "as a number"),
        ('{"hourly_usd": {"ml.x": "1.5"}}', "as a number"),
        ('{"hourly_usd": {}, "regoin": "x"}', "regoin: unknown key"),
        ('{"hourly_usd": {}, "source": [1]}', "source: found"),
        ('{"hourly_usd": {}, "region": "eu-west-1"}', "the job runs in us-east-1"),
        (" " * (1 << 20) + "{}", "too large; expected at most 1048576 bytes"),
    ],
)
def test_price_file_malformed_names_file_and_key(tmp_path: Path, content: str, message: str) -> None:
    price_file = tmp_path / "prices.json"
    price_file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        Catalogue.load(price_file=price_file, region="us-east-1")
    assert "prices.json" in str(caught.value)


@pytest.mark.attack("A17")
@pytest.mark.attack("A22")
def test_price_file_in_yaml_cannot_run_code(tmp_path: Path) -> None:
    price_file = tmp_path / "prices.yml"
    price_file.write_text("hourly_usd: !!python/object/apply:os.getcwd []\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not YAML that can be used"):
        Catalogue.load(price_file=price_file)


def test_price_file_missing_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Catalogue.load(price_file=tmp_path / "none.json")


@pytest.mark.parametrize("override", ["ml.x", "=1", "ml.x=", "ml.x=abc", "ml.x=nan", "ml.x=inf", "ml.x=0", "ml.x=-2"])
def test_price_flag_malformed_raises(override: str) -> None:
    with pytest.raises(ConfigError, match="--price"):
        Catalogue.load(overrides=[override])


def test_profile_unknown_or_of_another_region_raises() -> None:
    with pytest.raises(ConfigError, match="expected one of seed-2022"):
        Catalogue.load("2022")
    with pytest.raises(ConfigError, match="prices of us-east-1, but the job runs in eu-west-1"):
        Catalogue.load("seed-2022", region="eu-west-1")


def test_unknown_type_has_no_price_and_a_suggestion() -> None:
    catalogue = Catalogue.load("seed-2022")
    assert catalogue.find("ml.c5.9xlrge") is None
    line = catalogue.explain("ml.c5.9xlrge")
    assert line is not None
    assert line.startswith("no price for ml.c5.9xlrge; pass --price ml.c5.9xlrge=USD (did you mean ml.c5.9xlarge")
    assert catalogue.explain("ml.g5.xlarge") == "no price for ml.g5.xlarge; pass --price ml.g5.xlarge=USD"
    assert catalogue.explain("ml.c5.9xlarge") is None
    with pytest.raises(ConfigError, match="did you mean"):
        catalogue.get("c5.9xlarge")


def test_list_shows_every_type_and_how_to_price() -> None:
    text = list_text(Catalogue.load("seed-2022"))
    assert "| ml.c5.9xlarge " in text
    assert "37.688" in text
    assert f"4 of {len(Catalogue.load().types())} types have a price" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1


def test_show_names_the_source_of_each_group_of_facts() -> None:
    text = show_text(Catalogue.load(), "ml.m8i-flex.xlarge")
    assert "vCPU          4, two per core, 40 % of each sustained" in text
    assert "0.937 Gbit/s sustained, 12.5 Gbit/s in bursts" in text
    assert "hardware, network: EC2 API, DescribeInstanceTypes" in text
    for source in Catalogue.load().get("ml.m8i-flex.xlarge").sources.values():
        assert f"{source.title}, {source.as_of or 'date not recorded'}\n      {source.url}" in text
    assert "on 4 cards, the first with 100 Gbit/s" in show_text(Catalogue.load(), "ml.p4d.24xlarge")


def test_show_says_which_source_has_no_recorded_date() -> None:
    text = show_text(Catalogue.load(), "ml.c4.xlarge")
    assert "processor: Amazon EC2 Instance Types guide, previous generation, date not recorded" in text


def test_show_of_a_type_without_facts_states_none() -> None:
    text = show_text(Catalogue.load(overrides=["ml.z9.large=1"]), "ml.z9.large")
    assert "sources of the facts" not in text
    assert not any(character.isdigit() for character in text.partition("price")[0].replace("z9", ""))


def test_show_gives_price_with_date_and_source_or_says_there_is_none() -> None:
    priced = show_text(Catalogue.load("seed-2022"), "ml.p4d.24xlarge")
    assert "8 x NVIDIA A100 with 40 GiB each" in priced
    assert "37.688 USD/hour in us-east-1" in priced
    assert "2022" in priced
    assert "no price for ml.p4d.24xlarge; pass --price" in show_text(Catalogue.load(), "ml.p4d.24xlarge")
    assert "accelerators  -" in show_text(Catalogue.load(overrides=["ml.z9.large=1"]), "ml.z9.large")
    with pytest.raises(ConfigError, match="not in the catalogue"):
        show_text(Catalogue.load(), "ml.q.q")
