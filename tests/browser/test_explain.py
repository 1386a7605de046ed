"""The explainers compute what :mod:`fidelab.physics` computes, and follow the keyboard."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fidelab
from fidelab.core import KVSpec
from fidelab.core.errors import UsageError
from fidelab.core.sequence import KVLayer
from fidelab.physics.devices import devices
from fidelab.physics.explainer import KNOWN_MODELS, PUBLISHED_HILL, explainer
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from fidelab.report.explainer import write_explainer
from tests.browser.conftest import UNFOLD, Open, Visit

pytestmark = pytest.mark.browser

FORMATS = ("bf16", "k16v8", "fp8_e4m3", "q8_0", "int4")
RECURRENT = Geometry("recurrent", 4, (KVLayer(2, 64, 64),) * 2, 10**9, state_bytes=3_000_001, query_heads=4)
SHAPES = (RECURRENT, *KNOWN_MODELS)

# Set controls as a user would, and read what the page says, to the last bit.
SET = """(settings) => {
  for (const [id, value] of Object.entries(settings)) {
    const control = document.getElementById(id);
    control.value = value;
    control.dispatchEvent(new Event("input", { bubbles: true }));
    control.dispatchEvent(new Event("change", { bubbles: true }));
  }
  const named = [...document.querySelectorAll("data[id]")].map((found) => [found.id, Number(found.value)]);
  return Object.fromEntries(named);
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("explain") / "explain.html"
    return write_explainer(explainer(FORMATS, [RECURRENT]), fidelab.__version__, file)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[shape.name for shape in SHAPES])
def test_a_step_takes_what_physics_says_at_every_setting(number: int, page: Path, open_page: Open) -> None:
    visit, found, table = open_page(page), explainer(FORMATS), list(devices().values())
    places = [(0, 0), (9, 7), (24, 15), (37, 20), (len(found["contexts"]) - 1, len(found["batches"]) - 1)]
    n = 0
    for bits, label, (t, b) in itertools.product((16.0, 4.25), FORMATS, places):
        model, kv, bf16 = Model(SHAPES[number], bits), KVSpec.parse(label), KVSpec.parse("bf16")
        tokens, batch, which = found["contexts"][t], found["batches"][b], n % len(table)
        try:
            model.sequence(kv)
        except UsageError:  # latents: the page does not offer it
            continue
        n += 1
        said = visit(SET, {"model": number, "bits": bits, "kv": label, "device": which, "context": t, "batch": b})
        for side, spec in (("reference", bf16), ("chosen", kv)):
            device, cache = table[which], model.cache_bytes(spec, tokens, batch)
            seconds, _ = model.step_seconds(spec, tokens, batch, device)
            expected = {
                "weights": model.read_bytes(batch),
                "cache": cache,
                "weight-seconds": model.read_bytes(batch) / device.bandwidth,
                "cache-seconds": cache / device.bandwidth,
                "seconds": seconds,
                "rate": batch / seconds,
                "share": model.kv_share(spec, tokens, batch),
                "ceiling": model.ceiling(spec, bf16, tokens, batch),
                "limit": model.limit(spec, bf16),
                "needed": model.device_bytes(spec, tokens, batch),
            }
            wrong = {
                name: (said[f"{name}-{side}"], value)
                for name, value in expected.items()
                if said[f"{name}-{side}"] != pytest.approx(value, rel=1e-12)
            }
            assert wrong == {}, (label, bits, tokens, batch, device.name)
    assert n >= 40
    assert visit.faults == []


def test_each_step_of_the_loop_reads_all_weights_and_one_token_more(page: Path, open_page: Open) -> None:
    visit = open_page(page)
    model, kv = Model(SHAPES[1]), KVSpec.parse("q8_0")
    visit(SET, {"loop-model": 1, "loop-kv": "q8_0", "loop-prompt": 2, "loop-stride": 1})
    for n in range(4):
        said = visit(SET, {})
        assert said["loop-weights"] == model.read_bytes(1)
        assert said["loop-cache"] == model.cache_bytes(kv, 128 + n)
        assert said["loop-written"] == model.token_bytes(kv)
        assert said["loop-step"] == 129 + n
        visit.page.get_by_role("button", name="Next").click()
    assert visit("document.querySelectorAll('#loop-chart .s0 rect').length") == 5


def test_sliders_follow_arrow_keys_and_the_loop_plays_and_stops(page: Path, open_page: Open) -> None:
    visit = open_page(page)
    visit(UNFOLD)
    slider = visit.page.get_by_label("Sequences:")
    slider.focus()
    before = visit(SET, {})["cache-chosen"]
    visit.page.keyboard.press("ArrowRight")
    assert visit(SET, {})["cache-chosen"] > before
    assert slider.get_attribute("aria-valuetext") == visit("document.getElementById('batch-said').textContent")
    play = visit.page.locator("#loop-play")
    play.focus()
    visit.page.keyboard.press("Space")
    assert play.get_attribute("aria-pressed") == "true"
    visit.page.locator("#loop-chart .s0 rect").nth(1).wait_for()
    visit.page.keyboard.press("Space")
    assert play.get_attribute("aria-pressed") == "false"
    visit.page.get_by_role("button", name="Start over").click()
    assert visit("document.querySelectorAll('#loop-chart .s0 rect').length") == 1


def test_a_format_that_a_model_cannot_have_is_not_offered(page: Path, open_page: Open) -> None:
    visit = open_page(page)
    visit(SET, {"model": 1, "kv": "k16v8"})
    visit(SET, {"model": [shape.name for shape in SHAPES].index("DeepSeek-V3")})
    assert visit("document.querySelector('#kv option[value=k16v8]').disabled")
    assert visit("document.getElementById('kv').value") == "fp8_e4m3"
    assert visit.faults == []


def places(visit: Visit, style: str) -> Any:
    """Where a curve of the saturation runs: [[x, y], …] in its sheet."""
    path = visit(f"document.querySelector('#curves .stroke.{style} path').getAttribute('d')")
    return np.array([pair.split() for pair in path[1:].split("L")], dtype=float)


def test_the_published_curve_is_drawn_and_its_source_is_named(page: Path, open_page: Open) -> None:
    visit = open_page(page)
    text = visit("document.getElementById('saturation').textContent")
    assert PUBLISHED_HILL["source"] in text
    assert "not public" in text
    (x, y), published = places(visit, "s0").T, PUBLISHED_HILL
    batch = 2 ** (7 * (x - x[0]) / (x[-1] - x[0]))
    power, half = batch ** published["gamma"], published["b_half"] ** published["gamma"]
    hill = published["smax"] * power / (half + power)
    assert np.abs(np.polyval(np.polyfit(hill, y, 1), hill) - y).max() < 0.3  # pixels
