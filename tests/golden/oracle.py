"""An independent program for the figures of the golden runs: numpy and the definitions of docs/metrics/.

It imports nothing of fidelab.  It computes point estimates, no intervals and no decisions, from token ids, rows of
log-probabilities, or hidden states times the head.  ``oracle_text`` reads generated text.

``python -m tests.golden.oracle [RUN …]`` prints a line per figure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tests.golden.oracle_read import DATA, Array, Side, load
from tests.golden.oracle_text import CONFIDENT_FLIP, arithmetic, mcnemar, perturbed, retrieval, trajectory

__all__ = ["figures", "main"]

Figure = tuple[str, str, str, str, str, float]  # run, arm, source, figure, cell, value


def compare(p: Array | None, q: Array | None, targets: Sequence[int]) -> dict[str, Array]:
    """Columns [n] that compare rows p of the reference with rows q of the arm; ``bad`` rows are in no figure."""
    n, after = len(targets), np.asarray(targets)
    if p is None or q is None or len(p) != n or len(q) != n:
        return {"bad": np.ones(n, dtype=bool)}
    v = min(p.shape[1], q.shape[1])
    cut = np.full(n, np.nan)
    if p.shape[1] != q.shape[1]:
        longer = np.exp((p if p.shape[1] > v else q).astype(np.float64))
        cut = 1 - longer[:, :v].sum(axis=1) / longer.sum(axis=1)
    with np.errstate(all="ignore"):
        a, b = (side[:, :v].astype(np.float64) for side in (p, q))
        broken = ~((a < np.inf) & (b < np.inf)).all(axis=1)  # NaN is not below infinity
        a, b = (side - side.max(axis=1, keepdims=True) for side in (a, b))
        a, b = (side - np.log(np.exp(side).sum(axis=1, keepdims=True)) for side in (a, b))
        P, Q = np.exp(a), np.exp(b)

        def mean_log(weights: Array, x: Array, y: Array) -> Array:
            return np.maximum(0.0, np.where(weights > 0, weights * (x - y), 0.0).sum(axis=1))

        middle = np.log((P + Q) / 2)
        top_p, top_q, each = a.argmax(axis=1), b.argmax(axis=1), np.arange(n)
        tens = [side >= np.sort(side, axis=1)[:, -10:][:, :1] for side in (a, b)]
        untied = (tens[0].sum(axis=1) == 10) & (tens[1].sum(axis=1) == 10)
        known = (after >= 0) & (after < v)
        token = np.where(known, after, 0)
        ratio = np.where(known, a[each, token] - b[each, token], np.nan)
        columns = {
            "kl": mean_log(P, a, b),
            "rkl": mean_log(Q, b, a),
            "js": (mean_log(P, a, middle) + mean_log(Q, b, middle)) / 2,
            "tv": np.abs(P - Q).sum(axis=1) / 2,
            "chi2": np.where((a == b).all(axis=1), 0.0, np.where(P > 0, P**2 / Q, 0.0).sum(axis=1) - 1),
            "same": (top_p == top_q).astype(float),
            "flip": ((top_p != top_q) & (a[each, top_p] - a[each, top_q] >= CONFIDENT_FLIP)).astype(float),
            "overlap": np.where(untied, (tens[0] & tens[1]).sum(axis=1) / 10, np.nan),
            "dp": np.where(known, Q[each, token] - P[each, token], np.nan),
            "k3": np.exp(ratio) - 1 - ratio,
            "nll_p": np.where(known, -a[each, token], np.nan),
            "nll_q": np.where(known, -b[each, token], np.nan),
            "right_p": np.where(after >= 0, (top_p == after).astype(float), np.nan),
            "right_q": np.where(after >= 0, (top_q == after).astype(float), np.nan),
        }
        bad = broken | ((Q == 0) & (P > 0)).any(axis=1)
    found = {name: np.where(bad, np.nan, column) for name, column in columns.items()}
    return {**found, "bad": bad, "cut": np.where(bad, np.nan, cut)}


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Columns of all items, as far as some item has them."""
    names = {name for part in parts for name in part}
    return {n: np.concatenate([part.get(n, np.full(len(part["bad"]), np.nan)) for part in parts]) for n in names}


def over_windows(ref: Side, test: Side) -> dict[str, Array]:
    request = test.request
    first, last = request["first"], request["last"]
    parts = []
    for t, r in enumerate(ref.places(test)):
        after = [*request["windows"][t][first + 1 : last + 2]]
        parts.append(compare(ref.rows[r], test.rows[t], after + [-1] * (last - first + 1 - len(after))))
    return joined(parts)


def over_answers(ref: Side, test: Side) -> dict[str, Array]:
    given = test.request["continuations"]
    return joined([compare(ref.rows[r], test.rows[t], given[t]) for t, r in enumerate(ref.places(test))])


def means(c: Mapping[str, Array]) -> dict[str, float]:
    """The figures of axis kld."""
    good = ~c["bad"]
    found = {"n_items": float(len(good)), "n_failed": float((~good).sum())}
    if not good.any():
        return found
    kl = c["kl"][good]
    named = {"kl": "mean", "rkl": "reverse KL", "js": "Jensen–Shannon", "tv": "total variation", "chi2": "χ²"}
    named |= {"overlap": "top-10 overlap", "same": "same top token", "flip": "confident flips"}
    found |= {name: value for key, name in named.items() if math.isfinite(value := float(c[key][good].mean()))}
    known = good & np.isfinite(c["dp"])
    if known.any():
        found |= {"RMS Δp": math.sqrt(float((c["dp"][known] ** 2).mean())), "k3": float(c["k3"][known].mean())}
    shares = {"median": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9, "max": 100}
    found |= {name: float(np.percentile(kl, share)) for name, share in shares.items()}
    found["score"] = 100 * math.exp(-found["mean"])
    if (growth := float(np.log1p(c["chi2"][good]).mean())) > 0:
        found["rollout length"] = math.log(2) / growth
    if np.isfinite(c["cut"]).any():
        found["cut off"] = float(np.nanmean(c["cut"]))
    return found


def concentration(kl: Array, units: Array) -> dict[str, float]:
    """How much the mean rests on one document and on 1% of positions, and what one more document would have to cost."""
    sums = [float(kl[units == unit].sum()) for unit in sorted({*units.tolist()})]
    n, total = len(sums), float(kl.sum())
    found = {"unseen kinds": min(1.0, 3 / n)}
    if total > 0:
        most = sorted(kl.tolist(), reverse=True)[: max(1, math.ceil(0.01 * len(kl)))]
        found |= {"largest document": max(sums) / total, "largest 1% of positions": sum(most) / total}
    if total / len(kl) < 0.01:
        found["document to the margin"] = 0.01 * (n + 1) - total / len(kl) * n
    return found


def claims(c: Mapping[str, Array], cell: str, changes: bool) -> Iterator[tuple[str, str, float]]:
    """What a certificate of axis kld rests on: the losses, and positions at which one side alone is right."""
    good = ~c["bad"]
    if not good.any():
        return
    yield "mean KLD", f"0: {cell}", c["kl"][good].mean()
    if changes:
        yield "flips", f"1: {cell}", 1 - c["same"][good].mean()
    known = good & np.isfinite(c["right_p"])
    p, q = np.exp(-c["nll_p"][known]), np.exp(-c["nll_q"][known])
    yield "accuracy loss when sampling", f"{1 + changes}: {cell}", float((p - q).mean())
    p, q = c["right_p"][known], c["right_q"][known]
    harmful, beneficial = int((p > q).sum()), int((q > p).sum())
    yield "flips: net", "0", float((p - q).mean())
    counts = {"n": len(p), "harmful": harmful, "beneficial": beneficial, "p": mcnemar(harmful, beneficial)}
    yield from ((f"flips: {name}", "0", float(count)) for name, count in counts.items())


def forced(c: Mapping[str, Array], test: Side) -> dict[str, float]:
    good = ~c["bad"]
    kl, numbers = c["kl"], np.concatenate([np.arange(len(each)) for each in test.request["continuations"]])
    found = {"n_items": float(len(good)), "n_failed": float((~good).sum()), "prompts": float(len(test.rows))}
    if not good.any():
        return found
    kl, t = kl[good], numbers[good].astype(np.float64)
    found |= {"mean KL": kl.mean(), "median KL": np.median(kl), "largest KL": kl.max()}
    found |= {"99th percentile": np.percentile(kl, 99), "same top token": c["same"][good].mean()}
    found["score"] = 100 * math.exp(-kl.mean())
    # until half of all answers differ: token by token, over the answers that go on
    agree = -np.log(1 - c["tv"][good])
    total, end = 0.0, 0.0
    for token in sorted({*t.tolist()}):
        total, end = total + float(agree[t == token].mean()), token
        if total >= math.log(2):
            break
    if (rate := float(agree[t <= end].mean())) > 0:
        found["half-life"] = math.log(2) / rate
    slope, start = np.polyfit(t, kl, 1)
    found["KL growth in 1,000 tokens"] = 1000 * slope
    if start >= 0.01 or slope > 0:
        found["tokens until 0.01 nats"] = 0.0 if start >= 0.01 else (0.01 - start) / slope
    return found


def perplexity(part: str, c: Mapping[str, Array]) -> Iterator[tuple[str, str, float]]:
    known = np.isfinite(c["nll_p"]) & np.isfinite(c["nll_q"])
    p, q, cell = c["nll_p"][known], c["nll_q"][known], f"context {part}"
    ratio = float((q - p).mean())
    yield from (("ln ratio", cell, ratio), ("PPL change", cell, math.expm1(ratio)))
    yield from (("PPL", cell, math.exp(q.mean())), ("reference PPL", cell, math.exp(p.mean())))


def serving_ways(ref: Mapping[str, Side], test: Mapping[str, Side]) -> Iterator[tuple[str, str, float]]:
    def from_cold(sides: Mapping[str, Side], way: str) -> Array:
        cold, other = sides["cold"], sides[way]
        rows, skip = other.request["last"] - other.request["first"] + 1, other.request["first"] - cold.request["first"]
        pairs = zip(cold.rows, other.rows, strict=True)
        return np.concatenate([compare(None if a is None else a[skip:], b, [-1] * rows)["kl"] for a, b in pairs])

    for way in test.keys() - {"cold"}:
        if test[way].facts.get("engaged"):
            own, theirs = from_cold(test, way), from_cold(ref, way)
            yield from (("KL from cold", f"way {way}", own.mean()), ("reference's", f"way {way}", theirs.mean()))
            yield "added", f"way {way}", float((own - theirs).mean())


def axis_figures(axis: str, ref: dict[str, Side], test: dict[str, Side]) -> Iterator[tuple[str, str, float]]:
    """Figure, cell and value; the parts of an axis by name."""
    whole = {"trajectory": trajectory, "plad": perturbed, "gsm8k": arithmetic}
    if axis in whole:
        yield from ((name, "", value) for name, value in whole[axis](ref[""], test[""]).items())
    elif axis == "rniah":
        yield from ((name, "", value) for name, value in retrieval(ref["main"], test["main"]).items())
    elif axis == "forced":
        columns = over_answers(ref["kl"], test["kl"])
        yield from ((name, "", value) for name, value in forced(columns, test["kl"]).items())
    elif axis == "perplexity":
        lost = []
        for part in test:
            columns = over_windows(ref[part], test[part])
            lost.append(~(np.isfinite(columns["nll_p"]) & np.isfinite(columns["nll_q"])))
            yield from perplexity(part, columns)
        failed = np.concatenate(lost)
        yield from (("n_items", "", float(len(failed))), ("n_failed", "", float(failed.sum())))
    elif axis == "paths":
        yield from serving_ways(ref, test)
    elif axis == "kld":
        compared = {part: over_windows(ref[part], test[part]) for part in test}
        found = {part: means(columns) for part, columns in compared.items()}
        worst = max(found, key=lambda part: (found[part].get("mean", 0.0), -int(part or 0)))
        yield from ((name, "", value) for name, value in found[worst].items())
        for part in found if len(found) > 1 else ():
            yield from ((name, f"context {part}", found[part][name]) for name in ("mean", "same top token"))
        settings, columns = test[worst].request["settings"], compared[worst]
        every = np.array([unit for units in test[worst].request["units"] for unit in units])
        if not columns["bad"].all():
            good = ~columns["bad"]
            yield from ((name, "", value) for name, value in concentration(columns["kl"][good], every[good]).items())
        domain = dict(settings.get("domains", []))
        kinds = np.array([domain.get(unit, "") for units in test[worst].request["units"] for unit in units])
        for kind in sorted({*kinds.tolist()} - {""}):
            here = (kinds == kind) & ~columns["bad"]
            at = f"domain {kind}"
            yield from (("mean", at, columns["kl"][here].mean()), ("same top token", at, columns["same"][here].mean()))
            yield "positions", at, float(here.sum())


def over_control(axis: str, each: Sequence[tuple[str, str, float]]) -> float | None:
    """What is compared with the control, where no item failed; of several contexts the longest."""
    names = {"kld": "mean", "forced": "mean KL", "perplexity": "ln ratio", "rniah": "accuracy"}
    values = {(figure, cell): value for figure, cell, value in each}
    if values.get(("n_failed", ""), 0.0):
        return None
    figure = names.get(axis, "score")
    cell = max((cell for name, cell in values if name == figure), default="") if axis == "perplexity" else ""
    value = values.get((figure, cell))
    return None if value is None else value * (100 if axis == "rniah" else 1)


def figures(run: str) -> list[Figure]:
    """All figures of a stored run that this program computes."""
    text, roles = load(run)
    found: list[Figure] = []
    controls: dict[str, float] = {}
    for arm in text["arms"]:
        role, name = arm["role"], arm["arm"]["name"]
        kind = role.partition(":")[0]
        if kind == "twin":
            of = role.partition(":")[2]
            columns = over_windows(roles[f"candidate:{of}"]["kld"], roles[role]["kld"])
            found.append((run, of, "rounding noise", "mean", of, float(columns["kl"].mean())))
            continue
        shown = {"candidate": name, "control": "control" if role == "control" else f"control {name}"}.get(kind, kind)
        for axis in text["experiment"]["axes"]:
            sides = [
                {part.partition(".")[2]: side for part, side in roles[one].items() if part.partition(".")[0] == axis}
                for one in ("reference", role)
            ]
            if role == "reference" or not sides[1] or arm["ran"]["k_format"] != arm["arm"]["kv"]["k"]:
                continue  # nothing to compare, or another format ran
            each = [(figure, cell, float(value)) for figure, cell, value in axis_figures(axis, sides[0], sides[1])]
            found += [(run, shown, axis, figure, cell, value) for figure, cell, value in each]
            own = over_control(axis, each)
            if role == "control" and own is not None:
                controls[axis] = own
            elif kind == "candidate" and own is not None and axis in controls:
                found.append((run, shown, axis, "over control", "", own - controls[axis]))
            if axis == "kld" and kind == "candidate" and [*sides[1]] == [""]:
                at = f"context {sides[0][''].request['settings']['n_ctx']}"
                changes = "max_flips" in text["experiment"].get("limits", {})
                rest = claims(over_windows(sides[0][""], sides[1][""]), at, changes)
                found += [(run, shown, "certificate kld", figure, cell, float(value)) for figure, cell, value in rest]
    return found


def main(runs: Sequence[str]) -> list[Figure]:
    """Print and return the figures."""
    found = [figure for run in runs for figure in figures(run)]
    for run, arm, source, figure, cell, value in found:
        print(f"{run}, {arm}, {source}, {figure}{f' ({cell})' if cell else ''}: {value:.12g}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(path.stem for path in DATA.glob("*.json")))
