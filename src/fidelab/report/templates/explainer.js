"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);

  // ---------------------------------------------------------------- bytes and bounds, as fidelab.physics.traffic has them

  const reference = data.formats[0];
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const overLayers = (rows, tokens) => sum(rows.map(([each, window, n]) => n * each * Math.min(tokens, window ?? tokens)));
  const tokenBytes = (model, kv) => sum(model.formats[kv].map(([each, , n]) => n * each));
  const cacheBytes = (model, kv, tokens, batch) => batch * (overLayers(model.formats[kv], tokens) + model.state_bytes);
  const readBytes = (model, bits, batch) => {
    const share = model.experts ? 1 - (1 - model.active_experts / model.experts) ** batch : 0;
    return ((model.dense_parameters + share * model.expert_parameters) * bits) / 8;
  };
  const stepFlops = (model, tokens, batch) => batch * (2 * model.active_parameters + overLayers(model.attention, tokens));
  const step = (model, bits, kv, tokens, batch, device) => {
    const weights = readBytes(model, bits, batch);
    const cache = cacheBytes(model, kv, tokens, batch);
    const memory = (weights + cache) / device.bandwidth;
    const compute = device.flops === null ? 0 : stepFlops(model, tokens, batch) / device.flops;
    const seconds = Math.max(memory, compute);
    const needed = (model.parameters * bits) / 8 + cache;
    return {
      weights, cache, seconds, compute, needed, rate: batch / seconds, share: cache / (weights + cache),
      weightSeconds: weights / device.bandwidth, cacheSeconds: cache / device.bandwidth,
    };
  };
  const ceiling = (model, bits, kv, tokens, batch) => {
    const weights = readBytes(model, bits, batch);
    return (weights + cacheBytes(model, reference, tokens, batch)) / (weights + cacheBytes(model, kv, tokens, batch));
  };
  const hill = (x, { smax, b_half, gamma }) => {
    const ratio = Math.exp(gamma * (Math.log(x) - Math.log(b_half)));
    return (smax * ratio) / (1 + ratio);
  };
  const affine = (x, { a, b }) => (1000 * x) / (a + b * x); // ms to a rate per second

  // ------------------------------------------------------------------------------------------------ numbers as text

  const inWords = (value, digits = 3) => value.toLocaleString("en", { maximumSignificantDigits: digits });
  const scaled = (value, units) => {
    const [size, unit] = units.find(([least]) => value >= least) ?? units[units.length - 1];
    return `${inWords(value / size)} ${unit}`;
  };
  const bytesText = (n) => (n ? scaled(n, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "bytes"]]) : "0 bytes");
  const timeText = (n) => scaled(n, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
  const percent = (share) => `${(100 * share).toLocaleString("en", { maximumFractionDigits: 1 })}%`;
  const times = (ratio) => `${ratio.toFixed(ratio < 10 ? 2 : 1)}×`;
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  // ---------------------------------------------------------------------------------------------------- the page's parts

  const put = (id, text, value) => {
    const element = byId(id);
    element.textContent = text;
    if (value !== undefined) element.value = String(value);
  };
  const fill = (select, entries) => {
    select.replaceChildren(...entries.map(([value, text, disabled = false]) => {
      const option = new Option(text, value);
      option.disabled = disabled;
      return option;
    }));
  };
  const listen = (ids, event, act) => { for (const id of ids) byId(id)?.addEventListener(event, act); };
  /** A slider over the places of a list; `value()` is the entry. */
  const listSlider = (id, values, start, say) => {
    const slider = byId(id);
    Object.assign(slider, { min: 0, max: values.length - 1, step: 1, value: Math.max(0, values.indexOf(start)) });
    const value = () => values[Number(slider.value)];
    const show = () => {
      byId(`${id}-said`).textContent = say(value());
      slider.ariaValueText = say(value());
    };
    return { value, show };
  };
  /** A slider from a quarter of a number to four times it. */
  const factorSlider = (id, start) => {
    const slider = byId(id);
    Object.assign(slider, { min: -100, max: 100, step: 1, value: 0 });
    const value = () => start * 4 ** (Number(slider.value) / 100);
    const show = (scale = 1) => {
      byId(`${id}-said`).textContent = inWords(scale * value(), 4);
      slider.ariaValueText = inWords(scale * value(), 4);
    };
    return { value, show, reset: () => { slider.value = 0; } };
  };

  // ------------------------------------------------------------------------------------------------------------ drawing

  const drawn = (name, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  /** Round steps from `low` to `high`, about `n` of them. */
  const ticks = (low, high, n) => {
    const rough = (high - low) / n;
    const power = 10 ** Math.floor(Math.log10(rough));
    const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    return Array.from({ length: Math.floor((high - low) / size + 1e-9) + 1 }, (_, i) => low + i * size);
  };
  const compact = (n) => n.toLocaleString("en", { notation: n >= 10000 ? "compact" : "standard", maximumSignificantDigits: 3 });
  const binary = (n) => (n >= 2 ** 20 ? `${n / 2 ** 20}M` : n >= 1024 ? `${n / 1024}k` : String(n));
  /** Axes in a sheet as wide as there is room for; x is logarithmic (base 2) or in bands, y begins at `low`. */
  const sheet = (svg, { x, low = 0, high, xLabel, yLabel, yText = compact, xText = binary }) => {
    const width = Math.max(260, svg.parentElement.clientWidth - 28);
    const [height, left, right, top, bottom] = [width < 480 ? 260 : 320, 54, 14, 22, 44];
    const [from, to] = x;
    const atX = (value) => left + (Math.log2(value / from) / Math.log2(to / from)) * (width - left - right);
    const atY = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    for (const value of ticks(low, high, 5)) {
      svg.append(drawn("path", { class: "grid", d: `M${left} ${atY(value)}H${width - right}` }));
      svg.append(drawn("text", { x: left - 7, y: atY(value) + 4, "text-anchor": "end" }, yText(value)));
    }
    const powers = Math.round(Math.log2(to / from));
    const every = Math.ceil(powers / ((width - left - right) / 46));
    for (let n = 0; n <= powers; n += every) {
      const value = from * 2 ** n;
      svg.append(drawn("text", { x: atX(value), y: height - bottom + 18, "text-anchor": "middle" }, xText(value)));
    }
    svg.append(drawn("path", { class: "frame", d: `M${left} ${height - bottom}H${width - right}` }));
    svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
    svg.append(drawn("text", { x: left - 44, y: 12 }, yLabel));
    const line = (style, xs, f) => {
      const path = xs.map((value, n) => `${n ? "L" : "M"}${atX(value).toFixed(1)} ${atY(f(value)).toFixed(1)}`).join("");
      svg.append(drawn("g", { class: `stroke ${style}` }, drawn("path", { d: path })));
    };
    const upright = (value) => {
      svg.append(drawn("path", { class: "upright", d: `M${atX(value)} ${top}V${height - bottom}` }));
    };
    return { atX, atY, line, upright, width, left, right, top, bottom, height };
  };
  const between = (from, to) => {
    const n = 160;
    return Array.from({ length: n + 1 }, (_, i) => from * (to / from) ** (i / n));
  };
  const key = (style, text) => {
    const item = document.createElement("li");
    const swatch = drawn("svg", { width: 26, height: 8, "aria-hidden": "true" }, drawn("path", { d: "M0 4H26" }));
    swatch.setAttribute("class", `swatch ${style}`);
    item.append(swatch, text);
    return item;
  };

  // --------------------------------------------------------------------------------------------------- choices of models

  const modelOf = (id) => data.models[Number(byId(id).value)];
  /** Formats that this model's cache can have; the chosen one stays where it can. */
  const offer = (id, model) => {
    const chosen = byId(id).value;
    fill(byId(id), data.formats.map((kv) => [kv, kv in model.formats ? kv : `${kv} (not for latents)`, !(kv in model.formats)]));
    byId(id).value = chosen in model.formats ? chosen : data.formats.find((kv) => kv in model.formats && kv !== reference) ?? reference;
  };
  for (const id of ["model", "loop-model"]) fill(byId(id), data.models.map(({ name }, n) => [n, name]));

  // ------------------------------------------------------------------------------------------------------------ the loop

  const columns = 24;
  const prompt = listSlider("loop-prompt", [1, 16, 128, 1024, 4096, 8192, 16384, 32768, 65536, 131072], 1024, (n) => count(n, "token"));
  let presses = 0;
  let timer = null;
  const drawLoop = () => {
    prompt.show();
    const model = modelOf("loop-model");
    const kv = byId("loop-kv").value;
    const stride = Number(byId("loop-stride").value);
    const weights = readBytes(model, 16, 1);
    const before = (n) => prompt.value() + n * stride;
    const cache = (n) => cacheBytes(model, kv, before(n), 1);
    const tokens = before(presses);
    put("loop-weights", bytesText(weights), weights);
    put("loop-before", count(tokens, "token"));
    put("loop-cache", bytesText(cache(presses)), cache(presses));
    put("loop-written", bytesText(tokenBytes(model, kv)), tokenBytes(model, kv));
    put("loop-step", `token ${(tokens + 1).toLocaleString("en")}`, tokens + 1);
    const share = cache(presses) / (weights + cache(presses));
    put("loop-said", `${count(presses * stride, "step")} done; the next reads ${bytesText(weights + cache(presses))}, of which ` +
      `${percent(share)} is the cache of ${model.name} (16-bit weights, ${kv}).`);
    const shown = Array.from({ length: Math.min(presses, 12) }, (_, n) => before(presses - Math.min(presses, 12) + n) + 1);
    byId("loop-tokens").replaceChildren(...[`prompt: ${count(prompt.value(), "token")}`, ...(presses > 12 ? ["…"] : []), ...shown]
      .map((text, n, all) => {
        const item = document.createElement("li");
        item.textContent = typeof text === "number" ? text.toLocaleString("en") : text;
        item.classList.toggle("new", n > 0 && n === all.length - 1);
        return item;
      }));
    byId("loop-next").disabled = byId("loop-play").disabled = presses >= columns - 1;
    if (presses >= columns - 1) stop();

    const svg = byId("loop-chart");
    const high = 1.05 * (weights + cache(columns - 1));
    const unit = high >= 1e9 ? [1e9, "GB"] : high >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
    const paper = sheet(svg, {
      x: [1, 2], high: high / unit[0], xLabel: "steps, oldest first", yLabel: unit[1], xText: () => "",
    });
    const wide = (paper.width - paper.left - paper.right) / columns;
    for (let n = 0; n <= presses; n += 1) {
      const [w, c] = [weights / unit[0], (weights + cache(n)) / unit[0]];
      const box = { x: paper.left + n * wide + 1, width: Math.max(2, wide - 2) };
      svg.append(drawn("g", { class: "s0" }, drawn("rect", { class: "own", ...box, y: paper.atY(w), height: paper.atY(0) - paper.atY(w) })));
      svg.append(drawn("g", { class: "s1" }, drawn("rect", { class: "own", ...box, y: paper.atY(c), height: paper.atY(w) - paper.atY(c) })));
    }
    svg.setAttribute("aria-label", `Bytes per step: weights ${bytesText(weights)} in each; the cache from ${bytesText(cache(0))} to ${bytesText(cache(presses))}`);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    byId("loop-play").ariaPressed = "false";
    byId("loop-play").textContent = "Play";
  };
  const advance = () => {
    presses = Math.min(columns - 1, presses + 1);
    drawLoop();
  };
  const restart = () => {
    stop();
    presses = 0;
    drawLoop();
  };
  byId("loop-next").addEventListener("click", advance);
  byId("loop-reset").addEventListener("click", restart);
  byId("loop-play").addEventListener("click", () => {
    if (timer !== null) return stop();
    timer = setInterval(advance, 700);
    byId("loop-play").ariaPressed = "true";
    byId("loop-play").textContent = "Stop";
    return undefined;
  });
  byId("loop-model").addEventListener("change", () => offer("loop-kv", modelOf("loop-model")));
  listen(["loop-model", "loop-kv", "loop-stride", "loop-prompt"], "input", restart);
  listen(["loop-model", "loop-kv", "loop-stride"], "change", restart);

  // ------------------------------------------------------------------------------------------------- cache and bandwidth

  fill(byId("device"), data.devices.map(({ name, verified }, n) => [n, verified ? name : `${name} (as published)`]));
  fill(byId("bits"), data.weight_bits.map((bits) => [bits, bits]));
  byId("device").value = Math.max(0, data.devices.findIndex(({ name }) => name === "H100"));
  const context = listSlider("context", data.contexts, 8192, (n) => count(n, "token"));
  const batch = listSlider("batch", data.batches, 32, (n) => n.toLocaleString("en"));
  const colour = (kv) => { const n = data.formats.indexOf(kv); return `s${n % 8} d${n % 6}`; };
  const drawBandwidth = () => {
    context.show();
    batch.show();
    const [model, device] = [modelOf("model"), data.devices[Number(byId("device").value)]];
    const [kv, bits] = [byId("kv").value, Number(byId("bits").value)];
    const [tokens, sequences] = [context.value(), batch.value()];
    const both = [reference, kv].map((name) => step(model, bits, name, tokens, sequences, device));
    const [first, second] = both;
    const most = ceiling(model, bits, kv, tokens, sequences);
    const limit = tokenBytes(model, reference) / tokenBytes(model, kv);
    const isFull = model.formats[kv].some(([, window]) => window !== null && window < tokens);
    const reached = first.seconds / second.seconds;
    put("head", kv);
    put("bar-name", kv);
    put("said", kv === reference ? `At most ${inWords(first.rate)} tokens/s; ${percent(first.share)} of what a step reads is the cache.`
      : `${kv} can be at most ${times(reached)} as fast as ${reference} here; ${percent(first.share)} of what a step reads in ${reference} is the cache.`);
    const beyond = model.max_positions !== null && tokens > model.max_positions ? `; the model is made for ${model.max_positions.toLocaleString("en")} tokens` : "";
    const routed = model.experts ? "; experts are taken as chosen evenly" : "";
    put("setting", `${model.name}, ${inWords(bits)} bits per weight, ${count(tokens, "token")} × ${count(sequences, "sequence")}, ${device.name}: ` +
      `${inWords(device.bandwidth / 1e9, 4)} GB/s${device.verified ? "" : " as published, unverified"}, ${bytesText(device.memory)}${beyond}${routed}`);
    const longest = Math.max(...both.map(({ weightSeconds, cacheSeconds }) => weightSeconds + cacheSeconds));
    for (const [id, found] of [["bar-reference", first], ["bar", second]]) {
      const [weights, cache] = byId(id).children;
      weights.style.width = `${(100 * found.weightSeconds) / longest}%`;
      cache.style.width = `${(100 * found.cacheSeconds) / longest}%`;
    }
    const fits = ({ needed }) => (needed <= device.memory ? `${bytesText(needed)}, fits` : `${bytesText(needed)}, does not fit`);
    const bound = ({ seconds, compute }) => (seconds > compute ? "memory" : "compute");
    const table = [
      ["weights", "Weights read", both.map(({ weights }) => [bytesText(weights), weights])],
      ["cache", "Cache read", both.map(({ cache }) => [bytesText(cache), cache])],
      ["weight-seconds", "Time for weights", both.map(({ weightSeconds }) => [timeText(weightSeconds), weightSeconds])],
      ["cache-seconds", "Time for the cache", both.map(({ cacheSeconds }) => [timeText(cacheSeconds), cacheSeconds])],
      ["seconds", "Step at least (bound by)", both.map((found) => [`${timeText(found.seconds)} (${bound(found)})`, found.seconds])],
      ["rate", "Tokens/s of all sequences at most", both.map(({ rate }) => [inWords(rate), rate])],
      ["share", "Cache in what is read", both.map(({ share }) => [percent(share), share])],
      ["ceiling", "Speed-up that fewer bytes allow here", [["1.00×", 1], [times(most), most]]],
      ["limit", `The same as contexts grow without end${isFull ? " (but for windows)" : ""}`, [["1.00×", 1], [times(limit), limit]]],
      ["needed", "Memory for weights and cache", both.map((found) => [fits(found), found.needed])],
    ];
    byId("rows").replaceChildren(...table.map(([name, heading, cells]) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = heading;
      row.append(head, ...cells.map(([text, value], n) => {
        const cell = document.createElement("td");
        const datum = document.createElement("data");
        datum.id = `${name}-${n ? "chosen" : "reference"}`;
        datum.textContent = text;
        datum.value = String(value);
        cell.append(datum);
        return cell;
      }));
      return row;
    }));

    const others = data.formats.slice(1).filter((name) => name in model.formats);
    const at = (name) => (value) => ceiling(model, bits, name, value, sequences);
    const ends = [data.contexts[0], data.contexts[data.contexts.length - 1]];
    const highest = Math.max(1.1, ...others.flatMap((name) => data.contexts.map(at(name))));
    const paper = sheet(byId("ceilings"), { x: ends, low: 1, high: 1 + 1.06 * (highest - 1), xLabel: "context, tokens", yLabel: "speed-up at most", yText: (n) => n.toFixed(highest < 1.5 ? 2 : 1) });
    for (const name of others) paper.line(`${colour(name)}`, data.contexts, at(name));
    paper.upright(tokens);
    byId("ceilings").setAttribute("aria-label", `Largest speed-up by context at ${count(sequences, "sequence")}; at ${count(tokens, "token")}: ` +
      others.map((name) => `${name} ${times(at(name)(tokens))}`).join(", "));
    byId("ceilings-keys").replaceChildren(...others.map((name) => key(colour(name), `${name} ${times(at(name)(tokens))}`)));
  };
  byId("model").addEventListener("change", () => offer("kv", modelOf("model")));
  listen(["model", "device", "kv", "bits", "context", "batch"], "input", () => {
    offer("kv", modelOf("model"));
    drawBandwidth();
  });

  // ---------------------------------------------------------------------------------------------------------- saturation

  const names = ["smax", "b_half", "gamma"];
  const curves = Object.fromEntries(names.map((name) => [name, factorSlider(name, data.published[name])]));
  const drawCurves = () => {
    for (const slider of Object.values(curves)) slider.show();
    const h = Object.fromEntries(Object.entries(curves).map(([name, slider]) => [name, slider.value()]));
    const line = { a: (1000 * h.b_half) / h.smax, b: 1000 / h.smax };
    const grid = between(1, 128);
    const high = 1.08 * Math.max(...grid.map((x) => hill(x, h)), ...grid.map((x) => affine(x, line)));
    const svg = byId("curves");
    const paper = sheet(svg, { x: [1, 128], high, xLabel: "sequences", yLabel: "speed-up" });
    paper.line("s0 d0", grid, (x) => hill(x, h));
    paper.line("s1 d1", grid, (x) => affine(x, line));
    byId("curves-keys").replaceChildren(
      key("s0 d0", `Hill: Smax ${inWords(h.smax)}, B½ ${inWords(h.b_half)}, γ ${inWords(h.gamma)}`),
      key("s1 d1", "affine step: γ = 1"),
    );
    const at = [2, 8, 32].map((x) => `B = ${x}: Hill ${inWords(hill(x, h))}, affine ${inWords(affine(x, line))}`);
    put("curves-said", `${at.join("; ")}.`);
    svg.setAttribute("aria-label", `speed-up by sequences. ${at.join("; ")}`);
  };
  listen(names, "input", drawCurves);
  byId("curves-reset").addEventListener("click", () => {
    for (const slider of Object.values(curves)) slider.reset();
    drawCurves();
  });

  const drawAll = () => { drawLoop(); drawBandwidth(); drawCurves(); };
  offer("loop-kv", modelOf("loop-model"));
  byId("loop-kv").value = reference;
  offer("kv", modelOf("model"));
  drawAll();
  addEventListener("resize", drawAll);
})();
