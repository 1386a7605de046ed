"""A model card with what lies next to it, as the hub's own library reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, eval_result_entries_to_yaml, parse_eval_result_entries

from fidelab.core import Status
from fidelab.core.errors import UsageError
from fidelab.report.hub import (
    BADGE,
    EVAL_RESULTS,
    FRONTIER,
    DataSet,
    Published,
    eval_results,
    has_other_weights,
    metadata,
    model_card,
)
from fidelab.report.markdown import code_span
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, Borrowed, Report, RuntimeRecord
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import sample_report
from tests.run.harness import Done, cli, refused

DATA = DataSet("me/reference", "0" * 40)


def parts_of(card: str) -> tuple[dict[str, Any], str]:
    """The metadata of a model card, and its text."""
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def entries(text: str | None) -> list[EvalResultEntry]:
    """Entries as the hub's library reads them; it writes the same data again."""
    data = yaml.safe_load(text or "")
    found = parse_eval_result_entries(data)
    assert eval_result_entries_to_yaml(found) == data
    return found


def quantized(model: str, reference: str = "Qwen/Qwen2.5-7B@main", **settings: Any) -> tuple[Report, ArmRecord]:
    """A report of one file against a model of the hub, and its configuration."""
    report = sample_report()
    base = report.reference.model_copy(update={"model": reference, "weights_sha256": "0" * 64})
    one = report.candidates[0].model_copy(update={"model": model, "weights_sha256": "1" * 64})
    return report.model_copy(update={"reference": base, "candidates": (one,), "settings": settings}), one


def solved() -> tuple[Report, ArmRecord]:
    """A report whose candidate was asked GSM8K's problems and solves a half, but failed at needles."""
    measured = Measurement(
        status=Status.OK,
        metrics=(
            Definition("score", "points", "higher")(50.0, (47.0, 53.0), headline=True),
            Definition("accuracy", "share", "higher")(0.5, (0.47, 0.53)),
        ),
        n_items=1319,
        n_failed=0,
    )
    failed = Measurement(status=Status.FAILED, reason="no answer")
    report, one = quantized("./awq")
    one = one.model_copy(update={"axes": {**one.axes, "gsm8k": measured, "rniah": failed}})
    return report.model_copy(update={"candidates": (one,)}), one


@pytest.mark.parametrize(
    ("model", "library", "tags"),
    [
        ("me/model-awq", "transformers", ["fidelab", "quantized"]),
        ("/home/me/model-Q4_K_M.gguf", "gguf", ["fidelab", "gguf", "quantized"]),
    ],
)
def test_the_card_names_base_model_relation_library_and_tags(model: str, library: str, tags: list[str]) -> None:
    report, one = quantized(model)
    data: Any = ModelCard(model_card(report, one, Published(quantized_by="me"))).data
    assert data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-7B",
        "base_model_relation": "quantized",
        "quantized_by": "me",
        "library_name": library,
        "tags": tags,
    }


@pytest.mark.parametrize("reference", ["/data/bf16", "./bf16", "bf16", "Qwen/bf16.gguf", "models/bf16"])
def test_a_base_model_that_is_a_path_is_left_out_unless_it_is_named(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/bf16").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    report, one = quantized("./awq", reference)
    assert not {"base_model", "base_model_relation", "quantized_by"} & metadata(report, one, Published()).keys()
    named = metadata(report, one, Published(base_model="Qwen/Qwen2.5-7B"))
    assert (named["base_model"], named["base_model_relation"]) == ("Qwen/Qwen2.5-7B", "quantized")


def test_another_cache_of_the_same_weights_is_not_a_quantized_model() -> None:
    report, one = quantized("Qwen/Qwen2.5-7B")
    same = one.model_copy(update={"weights_sha256": report.reference.weights_sha256})
    assert not has_other_weights(report, same)
    assert metadata(report, same, Published()) == {"library_name": "transformers", "tags": ["fidelab"]}


def test_the_card_has_the_section_for_people_and_no_legacy_index() -> None:
    report, one = solved()
    data, body = parts_of(model_card(report, one))
    assert "model-index" not in data
    assert body == f"\n# Fidelity of {code_span(one.name)}\n\n{report.to_markdown()}"


def test_a_card_of_hostile_names_stays_metadata_and_text() -> None:
    for text in TEXTS:
        report = hostile_report(text)
        one = report.candidates[0].model_copy(update={"name": text, "model": text})
        card = model_card(report, one, Published(), images=True)
        data, body = parts_of(card)
        assert {*data} <= {"base_model", "base_model_relation", "library_name", "tags"}
        read: Any = ModelCard(card).data
        assert read.to_dict() == data
        assert body.startswith(f"\n# Fidelity of {code_span(text)}\n")


# ------------------------------------------------------------------------------------------------ .eval_results


def test_the_hub_reads_the_first_figures_of_every_test() -> None:
    report, one = solved()
    found = {entry.task_id: entry for entry in entries(eval_results(report, one, DATA))}
    headlines = [m for axis in one.axes.values() for m in axis.headlines if m.value is not None]
    assert len(found) == len(headlines) > 2
    assert {(entry.dataset_id, entry.dataset_revision) for entry in found.values()} == {DATA}
    assert {entry.date for entry in found.values()} == {report.created.date().isoformat()}
    mean = found["kld_mean"]
    assert mean.value == one.axes["kld"].value("mean")
    assert re.search(r": kld .*nats; 95% 0\.0\d+–0\.0\d+; reference .+ of Qwen/Qwen2\.5-7B@main; ", mean.notes or "")
    assert found["gsm8k_score"].value == 50.0
    assert "1,319 items" in str(found["gsm8k_score"].notes)


def test_entries_are_of_the_named_set_else_the_borrowed_reference_else_the_text_of_the_hub() -> None:
    report, one = quantized("./awq", text="wikitext-2")
    of_text = entries(eval_results(report, one))
    assert {entry.dataset_id for entry in of_text} == {"Salesforce/wikitext"}
    assert {entry.task_id.partition("_")[0] for entry in of_text} == {"kld"}  # other tests read other words
    packed = Borrowed(place=f"hf://me/pack@{'1' * 40}", sha256="0" * 64, machine="x")
    borrowed = report.model_copy(update={"borrowed": packed})
    assert {(e.dataset_id, e.dataset_revision) for e in entries(eval_results(borrowed, one))} == {("me/pack", "1" * 40)}
    assert {entry.dataset_id for entry in entries(eval_results(borrowed, one, DATA))} == {"me/reference"}
    for place in ("pack", "/data/pack"):
        local = report.model_copy(update={"settings": {}, "borrowed": packed.model_copy(update={"place": place})})
        assert eval_results(local, one) is None


def test_no_folder_of_this_machine_is_published() -> None:
    report, one = quantized("/home/somebody/awq", "/home/somebody/bf16")
    assert "somebody" not in f"{model_card(report, one)}{eval_results(report, one, DATA)}"


# --------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_card_drawings_and_results_next_to_each_other(made: Done, tmp_path: Path) -> None:
    words = (
        "report",
        made.folder,
        "--format",
        "hub",
        "--configuration",
        "tilt[q=0.6]",
        "--dataset",
        f"me/reference@{'a' * 40}",
    )
    done = cli(*words, "-o", "card/README.md", cwd=tmp_path)
    assert done.out.splitlines() == ["card/README.md", *(f"card/{name}" for name in (BADGE, FRONTIER, EVAL_RESULTS))]
    card = (tmp_path / "card/README.md").read_text()
    links = re.findall(r"!\[[^\n]*\]\((.+)\)", card)
    assert links == [BADGE, FRONTIER]
    for name in links:
        assert ElementTree.parse(tmp_path / "card" / name).getroot().tag.endswith("svg")
    assert {entry.dataset_id for entry in entries((tmp_path / "card" / EVAL_RESULTS).read_text())} == {"me/reference"}


def test_without_a_data_set_on_the_hub_the_results_are_left_out_and_one_line_says_so(
    made: Done, tmp_path: Path
) -> None:
    (tmp_path / "card").mkdir()
    done = cli("report", made.folder, "--format", "hub", "--configuration", "tilt[q=0.6]", "-o", "card", cwd=tmp_path)
    assert done.out.splitlines() == ["card/README.md", f"card/{BADGE}", f"card/{FRONTIER}"]
    [line] = done.err.splitlines()
    assert line.endswith("add --dataset owner/name")


def test_a_printed_card_shows_no_drawing_that_was_not_written(made: Done, tmp_path: Path) -> None:
    done = cli("report", made.folder, "--format", "hub", "--configuration", "tilt[q=0.6]", cwd=tmp_path)
    assert "![" not in done.out
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("place", ["card/README.md", "card"])
def test_a_card_that_is_there_is_not_replaced_nor_is_anything_next_to_it(
    place: str, made: Done, tmp_path: Path
) -> None:
    (tmp_path / "card").mkdir()
    (tmp_path / "card/README.md").write_text("mine")
    done = cli("report", made.folder, "--format", "hub", "--configuration", "tilt[q=0.9]", "-o", place, cwd=tmp_path)
    assert "card/README.md exists and is not replaced" in refused(done)
    assert [path.name for path in (tmp_path / "card").iterdir()] == ["README.md"]
    assert (tmp_path / "card/README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "hub", "--base-model", "./bf16"), "--base-model: './bf16' is not a hub id: write owner/name"),
        (("--format", "hub", "--base-model", "a/b@main"), "'a/b@main' is not a hub id"),
        (("--format", "hub", "--dataset", "reference"), "write owner/name or owner/name@COMMIT"),
        (("--format", "hub", "--dataset", ""), "--dataset: '' is not a hub id"),
        (("--format", "hub", "--base-model", ""), "--base-model: '' is not a hub id"),
        (("--format", "hub", "--dataset", "a/b@main"), "write owner/name or owner/name@COMMIT"),
        (("--format", "hub", "--quantized-by", "me/model"), "is not an account on the hub"),
        (("--format", "hub", "--quantized-by", ""), "is not an account on the hub"),
        (("--format", "lm-eval", "--dataset", "a/b"), "--dataset is for a model card: add --format hub"),
        (("--quantized-by", "me"), "--quantized-by goes with --format hub"),
        (("--csv", "--base-model", "a/b"), "goes with --format hub"),
    ],
)
def test_facts_of_a_publisher_are_names_on_the_hub_and_go_with_its_format(
    words: tuple[str, ...], said: str, made: Done, tmp_path: Path
) -> None:
    arm = ("--configuration", "tilt[q=0.6]") if "--format" in words else ()
    assert said in refused(cli("report", made.folder, *words, *arm, cwd=tmp_path))


def test_a_configuration_without_figures_has_no_card() -> None:
    report, one = quantized("./awq")
    with pytest.raises(UsageError, match="nothing for a model card"):
        model_card(report, one.model_copy(update={"axes": {}}))


def test_files_stand_in_one_table_with_size_bits_loss_and_verdict() -> None:
    report, one = quantized("/x/model-Q4_K_M.gguf", "/x/model-BF16.gguf")
    ran = RuntimeRecord(weight_bytes=2**31, bits_per_weight=4.83)
    report = report.model_copy(update={"candidates": (one.model_copy(update={"ran": ran}),)})
    table = model_card(report, one)
    assert "| file | GiB | bits per weight | KLD | same top | verdict |" in table.replace("configuration | ", "")
    assert re.search(r"\| `model-Q4_K_M\.gguf` \| 2\.00 \| 4\.83 \| 0\.0\d+ \| [\d.]+% \| \w+", table)
