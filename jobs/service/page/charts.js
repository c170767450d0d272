  // --- answers --------------------------------------------------------------------------------------------------

  function card(title, big, rows, tone) {
    return make("div", { class: "card" }, make("h2", {}, title), make("p", { class: `big ${tone || ""} ${String(big).length > 14 ? "long" : ""}` }, big),
      make("dl", {}, ...rows.filter((row) => row[1] !== null).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
  }
  function opCard(found) {
    return make("div", { class: "cards" },
      card("Latency", seconds(found.latency_us), [
        [`${Math.round(100 * found.coverage)} % interval`, `${seconds(found.low_us)} to ${seconds(found.high_us)}`],
        ["answered by", found.predictor ? `${found.engine}: ${found.predictor}` : found.engine],
        ["inside what was measured", found.in_envelope ? "yes" : "no: the interval is widened"]]),
      card("Bound", found.bound, [["roofline", seconds(found.roofline_us)], ["of the roofline's rate", percent(found.roofline_us / found.latency_us)],
        ["power", found.power_w === null ? null : `${found.power_w.toFixed(0)} W`]]));
  }
  const STEP_FIGURES = [["step_time_s", "step time", "s"], ["ttft_ms", "first token (TTFT)", "ms"], ["tpot_ms", "next tokens (TPOT)", "ms"], ["e2e_ms", "whole answer", "ms"], ["tokens_per_s_per_gpu", "tokens a second and GPU", "count"],
    ["mfu", "model FLOPs utilisation (MFU)", "share"], ["hfu", "hardware FLOPs utilisation (HFU)", "share"], ["power_w", "power of a GPU", "w"], ["energy_j", "energy", "j"], ["cost", "cost of a step, in the currency of the price", "count"]];
  function stepFigures(found) {
    const figures = STEP_FIGURES.filter(([name]) => typeof found[name] === "number").map(([name, words, kind]) => [words, found[name], kind]);
    figures.push(["peak memory", found.memory.peak_gib, "gib"]);
    for (const share of found.breakdown?.by_op || []) figures.push([`time of ${share.kind.replaceAll("_", " ")}`, share.time_s, "s"]);
    return figures;
  }
  function tooLarge(found) {
    return make("div", { class: "cards" }, card("Does not fit", `${rounded(found.memory.peak_gib)} GiB`,
      [["weights", `${rounded(found.memory.weights_gib)} GiB`], ["activations", `${rounded(found.memory.activations_gib)} GiB`], ["to make it fit", found.memory.advice], ["times below", "if it did fit"]], "poor"));
  }
  // Plotly is brought once, and only where a report is shown.
  let drawer = null;
  const plotly = () => (drawer ??= new Promise((resolve, reject) => {
    const script = make("script", { src: "/static/plotly.js", onload: () => resolve(window.Plotly), onerror: () => reject(new Error("the charts did not come: ask again")) });
    document.head.append(script);
  }));
  // A report of the service within the page: its cards and sections, its charts drawn when it is shown.
  function reported(text) {
    const held = make("div", { class: "report" });
    held.append(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
    held.addEventListener("shown", () => { redraw = opcastReport(held, plotly()); });
    return held;
  }
  // `note` is what of a row stands in words below it, over its whole width.
  function table(caption, heads, rows, note) {
    const words = heads.map((head) => (rows.some((row) => row[head] && !/^[-+−–\d.,%() ]*$/.test(row[head])) ? "words" : null));
    const cells = (row) => heads.map((head, at) => make("td", { class: words[at] }, typeof row[head] === "number" ? rounded(row[head]) : String(row[head] ?? "")));
    const below = (row) => make("tr", {}, make("td", {}), make("td", { class: "words note", colspan: heads.length - 1 }, make("div", {}, `${note}: ${row[note]}`)));
    const lines = (row) => (note && row[note] ? [make("tr", { class: "noted" }, ...cells(row)), below(row)] : [make("tr", {}, ...cells(row))]);
    return make("section", {}, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head, at) => make("th", { scope: "col", class: words[at] }, head)))), make("tbody", {}, ...rows.flatMap(lines)))));
  }

  // A row for each point of a sweep: its axes, the figures that count most, and why there is no answer.
  function sweepTable(found) {
    const figures = { days: "days.p50", "GPU-hours": "gpu_hours.p50", price: "cost.p50", kWh: "kwh.p50", goodput: "goodput.p50" };
    const kept = Object.entries(figures).filter(([, name]) => found.rows.some((row) => row[name] !== undefined && row[name] !== null));
    const rows = found.rows.map((row) => ({ ...Object.fromEntries(found.axes.map((name) => [name, row[name]])), ...Object.fromEntries(kept.map(([title, name]) => [title, row[name]])), error: row.error }));
    return table("All points", [...found.axes, ...kept.map(([title]) => title)], rows, "error");
  }

  // Latency over one dim, from an eighth to eight times its value, both axes logarithmic.
  async function varied(body, dim, signal) {
    const centre = Number(body.op[dim]);
    const values = [...new Set(Array.from({ length: 25 }, (_, at) => Math.max(1, Math.round(centre * 2 ** ((at - 12) / 4)))))];
    let found;
    try {
      found = (await call("/v1/predict/batch", { ...body, op: undefined, ops: values.map((value) => ({ ...body.op, [dim]: value })) }, signal)).predictions;
    } catch (error) {
      return make("p", { class: "caption" }, `No picture: ${error.message}`);
    }
    return make("section", {}, make("h2", {}, `Latency over ${dim}`), make("p", { class: "lead" }, "Line: predicted. Band: its interval. Dashed: roofline. Both axes are logarithmic."), curve(values, found, dim));
  }
  const across = () => (window.matchMedia("(max-width: 600px)").matches ? 360 : 640); // of a picture: on a phone its words stay readable
  function curve(values, found, dim) {
    const [width, height, left, bottom, top] = [across(), 280, 64, 34, 10];
    const times = found.flatMap((each) => [each.low_us, each.high_us, each.roofline_us]).filter((us) => us > 0);
    const [low, high] = [Math.log(Math.min(...times)), Math.log(Math.max(...times))];
    const [first, last] = [Math.log(values[0]), Math.log(values.at(-1))];
    const x = (value) => left + ((width - left - 12) * (Math.log(value) - first)) / (last - first || 1);
    const y = (us) => top + (height - top - bottom) * (1 - (Math.log(us) - low) / (high - low || 1));
    const path = (pick) => found.map((each, at) => `${at ? "L" : "M"}${x(values[at]).toFixed(1)},${y(pick(each)).toFixed(1)}`).join("");
    const band = path((each) => each.high_us) + found.map((each, at) => [x(values[at]), y(each.low_us)]).reverse().map(([a, b]) => `L${a.toFixed(1)},${b.toFixed(1)}`).join("") + "Z";
    const marks = [0, 1, 2, 3, 4].map((at) => Math.exp(low + ((high - low) * at) / 4));
    const svg = make("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Predicted latency over ${dim}` },
      ...marks.flatMap((us) => [make("line", { class: "grid", x1: left, x2: width - 12, y1: y(us), y2: y(us) }), make("text", { x: left - 6, y: y(us) + 4, "text-anchor": "end" }, seconds(Number(us.toPrecision(2))))]),
      ...[values[0], values[12] ?? values.at(-1), values.at(-1)].map((value, at) => make("text", { x: x(value), y: height - 12, "text-anchor": ["start", "middle", "end"][at] }, `${dim} ${rounded(value)}`)),
      make("path", { class: "band", d: band }), make("path", { class: "roof", d: path((each) => each.roofline_us) }), make("path", { class: "line", d: path((each) => each.latency_us) }),
      ...found.map((each, at) => make("circle", { cx: x(values[at]), cy: y(each.latency_us), r: 3.5, tabindex: 0, role: "img", "aria-label": `${dim} ${values[at]}: ${seconds(each.latency_us)}` }, make("title", {}, `${dim} ${values[at]}: ${seconds(each.latency_us)} (${seconds(each.low_us)} to ${seconds(each.high_us)}), ${each.engine}`))));
    return svg;
  }

  // --- chips side by side
  const chipName = (row) => (row.cap_w === null ? row.cluster : `${row.cluster} at ${row.cap_w} W`);
  function chipCards(found) {
    const rows = found.rows.filter((row) => row.fits);
    const best = (name, most) => rows.filter((row) => row[name] !== null).sort((a, b) => (most ? b[name] - a[name] : a[name] - b[name]))[0];
    const told = (title, row, text, lines) => row && card(title, chipName(row), [[...text(row)], ...lines(row)]);
    return make("div", { class: "cards" }, ...[
      told("Fastest", best("speed", true), (row) => ["as fast as the first", `${row.speed.toFixed(2)} times`], (row) => [["tokens/s and GPU", rounded(row.tokens_per_s_per_gpu)]]),
      told("Cheapest token", best("price", false), (row) => ["price of a million tokens", rounded(row.price)], (row) => [["price of a GPU hour", rounded(row.price_per_gpu_hour)]]),
      told("Least energy", best("joules", false), (row) => ["joules a token", rounded(row.joules)], (row) => [["power of a GPU", row.power_w === null ? null : `${row.power_w.toFixed(0)} W`]])].filter(Boolean));
  }
  // Speed of each beside the first, with its interval.
  function chipBars(found) {
    const [width, left, line] = [across(), across() > 400 ? 150 : 110, 30];
    const most = Math.max(...found.rows.map((row) => row.speed_high));
    const x = (speed) => left + ((width - left - 48) * speed) / most;
    const bars = found.rows.flatMap((row, at) => {
      const y = 8 + line * at;
      const words = `${chipName(row)}: ${row.speed.toFixed(2)} times, ${row.speed_low.toFixed(2)} to ${row.speed_high.toFixed(2)}${row.fits ? "" : ", does not fit"}`;
      return [make("text", { x: left - 8, y: y + 15, "text-anchor": "end" }, chipName(row)),
        make("rect", { class: row.fits ? "bar" : "bar unfit", x: left, y: y + 2, width: x(row.speed) - left, height: line - 12, rx: 3, tabindex: 0, role: "img", "aria-label": words }, make("title", {}, words)),
        make("line", { class: "span", x1: x(row.speed_low), x2: x(row.speed_high), y1: y + 11, y2: y + 11 }),
        make("text", { x: x(row.speed_high) + 6, y: y + 15 }, row.speed.toFixed(2))];
    });
    return make("section", {}, make("h2", {}, "Speed beside the first"), make("p", { class: "lead" }, "Tokens a second and GPU over those of the first. Line: the interval."),
      make("svg", { class: "curve", viewBox: `0 0 ${width} ${16 + line * found.rows.length}`, role: "group", "aria-label": "Speed of each chip beside the first" }, ...bars));
  }
  function chipTable(found) {
    const rows = found.rows.map((row) => ({
      chip: chipName(row), GPUs: row.devices, "tokens/s and GPU": row.tokens_per_s_per_gpu, speed: row.speed.toFixed(2), "J a token": row.joules ?? "", "W": row.power_w ?? "",
      "price of 1M tokens": row.price ?? "", "worth a GPU hour": row.break_even ?? "", "peak GiB": row.peak_gib, fits: row.fits ? "yes" : "no" }));
    const columns = Object.keys(rows[0]).filter((name) => rows.some((row) => row[name] !== ""));
    return make("div", {}, table("Chips", columns, rows), ...found.notes.map((note) => make("p", { class: "caption" }, note)));
  }

  const LAYOUT = ["tp", "pp", "vpp", "cp", "ep", "zero_stage", "sequence_parallel", "micro_batch", "recompute"];
  function servingCards(found) {
    const spread = (title, held) => held.p50 === null ? card(title, "none served", []) : card(title, seconds(held.p50 * 1e3), [["p90", seconds(held.p90 * 1e3)], ["p99", seconds(held.p99 * 1e3)], ["mean", seconds(held.mean * 1e3)]]);
    return make("div", {}, found.overload ? make("p", { class: "error" }, found.overload) : null, make("div", { class: "cards" },
      spread("First token (TTFT)", found.ttft_ms), spread("Each next token (TPOT)", found.tpot_ms), spread("Whole answer", found.e2e_ms),
      card("Served", `${rounded(found.requests_per_s)} requests/s`, [["output tokens/s and GPU", rounded(found.output_tokens_per_s_per_gpu)], ["met what users expect", percent(found.slo_attainment)], ["KV memory at its peak", percent(found.kv_peak)], ["tokens in an iteration, mean", rounded(found.mean_batch)], ["preempted", rounded(found.preemptions)], ["rejected", rounded(found.rejected)]])));
  }
  // How many requests had their first token, and their next ones, within a time.
  function cdf(found, values) {
    const [width, height, left, bottom, top] = [across(), 280, 48, 34, 10];
    const chart = (name, title, limit) => {
      const points = found.cdf[name].filter(([ms]) => ms > 0);
      if (points.length < 2) return null;
      // What users expect stands in the picture where it is near the requests; else words at the edge say where it is.
      const [least, most] = [points[0][0], points.at(-1)[0]];
      const near = limit && limit >= least / 1.5 && limit <= most * 1.5;
      const [low, high] = [Math.log(near ? Math.min(least, limit) : least), Math.log(near ? Math.max(most, limit) : most)];
      const x = (ms) => left + ((width - left - 16) * (Math.log(ms) - low)) / (high - low || 1);
      const y = (share) => top + (height - top - bottom) * (1 - share);
      const marks = [0, 1, 2, 3].map((at) => Math.exp(low + ((high - low) * at) / 3));
      const digits = [2, 3, 4].find((few) => new Set(marks.map((ms) => ms.toPrecision(few))).size === marks.length) || 4; // no two alike
      return make("section", {}, make("h2", {}, title), make("p", { class: "lead" }, !limit ? "Share of requests that had it within a time." : near ? "Share of requests that had it within a time. Dashed: what users expect."
          : `Share of requests that had it within a time. All took ${limit > most ? "less" : "more"} than the ${seconds(limit * 1e3)} that users expect, which lies beyond the ${limit > most ? "right" : "left"} edge.`),
        make("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: half within ${seconds(found[name].p50 * 1e3)}, nine in ten within ${seconds(found[name].p90 * 1e3)}` },
          ...[0, 0.5, 0.9, 1].flatMap((share) => [make("line", { class: "grid", x1: left, x2: width - 16, y1: y(share), y2: y(share) }), make("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`)]),
          ...marks.map((ms, at) => make("text", { x: x(ms), y: height - 12, "text-anchor": ["start", "middle", "middle", "end"][at] }, seconds(Number((ms * 1e3).toPrecision(digits))))),
          near ? make("line", { class: "roof", x1: x(limit), x2: x(limit), y1: top, y2: height - bottom }) : null,
          make("path", { class: "line", d: points.map(([ms, share], at) => `${at ? "L" : "M"}${x(ms).toFixed(1)},${y(share).toFixed(1)}`).join("") })));
    };
    return make("div", {}, chart("ttft_ms", "Time to first token", Number(values["slo.ttft_ms"])), chart("tpot_ms", "Time per output token", Number(values["slo.tpot_ms"])));
  }

  const says = (row, name) => name === "tp" || name === "pp" || ((row[name] || name === "zero_stage") && (row[name] !== 1 || name === "zero_stage" || name === "micro_batch") && row[name] !== "none" && (name !== "sequence_parallel" || row.tp > 1) && row[name] !== undefined);
  const layout = (row) => `${LAYOUT.filter((name) => says(row, name)).map((name) => `${name}=${row[name]}`).join(" ")}${row.dp ? ` dp=${row.dp}` : ""}`;
  const TIE = { noise: "repeats differ by more", interval: "intervals overlap" };
  const tiesSaid = (found, what) => (found.ties === 1 ? `one other ${what.replace(/s$/, "")} cannot be told apart from it` : found.ties ? `${rounded(found.ties)} other ${what} cannot be told apart from it` : `no other ${what.replace(/s$/, "")} is as good`);
  function searchCards(found) {
    const best = found.best[0];
    return make("div", { class: "cards" },
      card("Best layout", `${layout(best)} on ${rounded(best.devices)} GPUs`, [["step", seconds(best.step_time_s * 1e6)], ["peak memory", `${rounded(best.peak_gib)} GiB`], ["MFU", percent(best.mfu)]]),
      card("Searched", `${rounded(found.points)} layouts`, [["simulated", rounded(found.evaluated)], ["left out by bounds and memory", rounded(found.pruned)], ["ties", tiesSaid(found, "layouts")]]));
  }
  function bestTable(found) {
    const rows = found.best.map((row) => ({ "": row.rank, layout: layout(row), "step, s": row.step_time_s, "tokens/s/GPU": row.tokens_per_s_per_gpu, "MFU, %": 100 * row.mfu, GiB: row.peak_gib, tie: TIE[row.tie] ?? row.tie, "than the next": row.reason }));
    return table("The best layouts", ["", "layout", "step, s", "tokens/s/GPU", "MFU, %", "GiB", "tie"], rows, "than the next");
  }
  // Step time over memory: the front as a line, points that lead to their step.
  function pareto(found, values) {
    const rows = [...found.pareto].sort((a, b) => a.step_time_s - b.step_time_s);
    const all = [...rows, ...found.best.filter((row) => !rows.some((front) => layout(front) === layout(row)))];
    const [width, height, left, bottom, top] = [across(), 280, 64, 34, 10];
    const span = (pick) => { const held = all.map(pick); return [Math.min(...held) * 0.97, Math.max(...held) * 1.03]; };
    const [[x0, x1], [y0, y1]] = [span((row) => row.step_time_s), span((row) => row.peak_gib)];
    const x = (value) => left + ((width - left - 16) * (value - x0)) / (x1 - x0 || 1);
    const y = (value) => top + (height - top - bottom) * (1 - (value - y0) / (y1 - y0 || 1));
    const step = (row) => {
      const asked = { model: values.model, cluster: row.cluster, nodes: row.nodes, seq_len: values.seq_len, global_batch: values.global_batch, stack: values.stack };
      for (const name of LAYOUT) if (row[name] && row[name] !== "none") asked[name] = row[name];
      go("step", asked);
    };
    const point = (row, front) => make("circle", { cx: x(row.step_time_s), cy: y(row.peak_gib), r: front ? 6 : 4, class: front ? null : "other", tabindex: 0, role: "link",
      "aria-label": `${layout(row)}: ${seconds(row.step_time_s * 1e6)}, ${rounded(row.peak_gib)} GiB`, onclick: () => step(row), onkeydown: (event) => { if (event.key === "Enter") step(row); } },
      make("title", {}, `${layout(row)}: ${seconds(row.step_time_s * 1e6)}, ${rounded(row.peak_gib)} GiB`));
    const ticks = (low, high) => [0, 1, 2, 3].map((at) => low + ((high - low) * at) / 3);
    return make("section", {}, make("h2", {}, "Step time against memory"), make("p", { class: "lead" }, "Line: the Pareto front, where no other layout is better in both. Other points: the rest of the best."),
      make("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Step time against peak memory" },
        ...ticks(y0, y1).flatMap((gib) => [make("line", { class: "grid", x1: left, x2: width - 16, y1: y(gib), y2: y(gib) }), make("text", { x: left - 6, y: y(gib) + 4, "text-anchor": "end" }, `${Number(gib.toPrecision(3))} GiB`)]),
        ...ticks(x0, x1).map((s, at) => make("text", { x: x(s), y: height - 12, "text-anchor": ["start", "middle", "middle", "end"][at] }, seconds(Number((s * 1e6).toPrecision(3))))),
        make("path", { class: "line", d: rows.map((row, at) => `${at ? "L" : "M"}${x(row.step_time_s).toFixed(1)},${y(row.peak_gib).toFixed(1)}`).join("") }),
        ...all.map((row, at) => point(row, at < rows.length))));
  }

  const degrees = (row, prefix) => ["tp", "pp", "dp", "ep"].filter((name) => name === "tp" || row[prefix + name] !== 1).map((name) => `${name}=${row[prefix + name]}`).join(" ");
  const way = (row) => (row.pools === "together" ? `each of ${row.replicas}: ${degrees(row, "")} batch=${row.batch} max_tokens=${row.max_tokens}`
    : `prefill on ${row.prefill_replicas}: ${degrees(row, "prefill_")}, decode on ${row.replicas}: ${degrees(row, "")} batch=${row.batch} max_tokens=${row.max_tokens}`);
  function waysCards(found) {
    const best = found.best[0];
    return make("div", { class: "cards" },
      card("Best way to serve", way(best), [["GPUs", rounded(best.devices)], ["output tokens/s a GPU", rounded(best.tokens_per_s_per_gpu)], ["requests/s", rounded(best.requests_per_s)]]),
      card("For users", `${rounded(best.tokens_per_s_per_user)} tokens/s`, [["TTFT", seconds(best.ttft_ms * 1e3)], ["TPOT", seconds(best.tpot_ms * 1e3)], ["whole answer", seconds(best.e2e_ms * 1e3)]]),
      card("Searched", `${rounded(found.points)} ways`, [["looked at", rounded(found.evaluated)], ["left out", rounded(found.pruned)], ["ties", tiesSaid(found, "ways")]]));
  }
  function waysTable(found) {
    const rows = found.best.map((row) => ({ "": row.rank, "way to serve": way(row), "tokens/s/GPU": row.tokens_per_s_per_gpu, "tokens/s/user": row.tokens_per_s_per_user, "TTFT, ms": row.ttft_ms, "TPOT, ms": row.tpot_ms, tie: TIE[row.tie] ?? row.tie, "than the next": row.reason }));
    return table("The best ways to serve", ["", "way to serve", "tokens/s/GPU", "tokens/s/user", "TTFT, ms", "TPOT, ms", "tie"], rows, "than the next");
  }
  // Use of GPUs over speed for users: the front as a line, points that lead to their traffic.
  function waysFront(found, values) {
    const rows = [...found.pareto].sort((a, b) => a.tokens_per_s_per_user - b.tokens_per_s_per_user);
    const [width, height, left, bottom, top] = [across(), 300, 64, 34, 10];
    const most = (pick) => Math.max(...rows.map(pick)) * 1.05;
    const [x1, y1] = [most((row) => row.tokens_per_s_per_user), most((row) => row.tokens_per_s_per_gpu)];
    const x = (value) => left + ((width - left - 16) * value) / x1;
    const y = (value) => top + (height - top - bottom) * (1 - value / y1);
    const play = (row) => {
      const asked = { model: values.model, cluster: row.cluster, nodes: Math.ceil((row.tp * row.pp * row.dp) / 8), tp: row.tp, "scheduler.policy": row.policy,
        "traffic.arrival": "closed", "traffic.concurrency": row.batch * row.dp, "traffic.requests": Math.min(4 * row.batch * row.dp, 2000), "traffic.input.mean": values.input_len, "traffic.output.mean": values.output_len };
      go("serving", asked);
    };
    const said = (row) => `${way(row)}: ${rounded(row.tokens_per_s_per_gpu)} tokens/s a GPU, ${rounded(row.tokens_per_s_per_user)} a user`;
    const point = (row) => make("circle", { cx: x(row.tokens_per_s_per_user), cy: y(row.tokens_per_s_per_gpu), r: 6, class: row.pools === "apart" ? null : "other", tabindex: 0, role: row.pools === "apart" ? "img" : "link",
      "aria-label": said(row), ...(row.pools === "apart" ? {} : { onclick: () => play(row), onkeydown: (event) => { if (event.key === "Enter") play(row); } }) }, make("title", {}, said(row)));
    const ticks = (high) => [0, 1, 2, 3].map((at) => (high * at) / 3);
    return make("section", {}, make("h2", {}, "Use of GPUs against speed for users"), make("p", { class: "lead" }, "Line: the Pareto front of those that give users what they expect. Grey points: one pool; a click plays the traffic of one replica. Others: pools apart."),
      make("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Output tokens a second and GPU over tokens a second and user" },
        ...ticks(y1).flatMap((rate) => [make("line", { class: "grid", x1: left, x2: width - 16, y1: y(rate), y2: y(rate) }), make("text", { x: left - 6, y: y(rate) + 4, "text-anchor": "end" }, rounded(Math.round(rate)))]),
        ...ticks(x1).map((rate, at) => make("text", { x: x(rate), y: height - 12, "text-anchor": ["start", "middle", "middle", "end"][at] }, `${Math.round(rate)} a user`)),
        make("path", { class: "line", d: rows.map((row, at) => `${at ? "L" : "M"}${x(row.tokens_per_s_per_user).toFixed(1)},${y(row.tokens_per_s_per_gpu).toFixed(1)}`).join("") }),
        ...rows.map(point)));
  }

