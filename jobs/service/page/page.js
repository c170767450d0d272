(() => {
  "use strict";
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const lists = new Map(); // name -> promise of its rows

  // --- small helpers ------------------------------------------------------------------------------------

  // An element: make("p", {class: "note"}, "text", child …)
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "line", "circle", "text", "title", "g"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }
  function seconds(us) {
    if (us === null || us === undefined) return "–";
    const [unit, size] = us >= 1e6 ? ["s", 1e6] : us >= 1e3 ? ["ms", 1e3] : ["µs", 1];
    return `${Number((us / size).toPrecision(4))} ${unit}`;
  }
  const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
  const rounded = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value ?? "–"));

  // --- theme ----------------------------------------------------------------------------------------------

  function stored(area, name, value) {
    try {
      if (value === undefined) return area.getItem(name);
      area.setItem(name, value);
    } catch { /* storage may be forbidden */ }
    return null;
  }
  const theme = stored(localStorage, "opcast-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  $("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored(localStorage, "opcast-theme", root.dataset.theme);
  });

  // --- calls ----------------------------------------------------------------------------------------------

  async function call(path, body, signal) {
    const headers = {};
    const token = stored(sessionStorage, "opcast-token");
    if (token) headers.Authorization = `Bearer ${token}`;
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    if (response.status === 401) {
      $("token-form").hidden = false;
      $("token").focus();
    }
    if (!response.ok) {
      let said = `${response.status} ${response.statusText}`;
      try { said = (await response.json()).error.message; } catch { /* not ours */ }
      throw new Error(said);
    }
    return (response.headers.get("content-type") || "").startsWith("text/html") ? response.text() : response.json();
  }
  // A stream of server-sent events: its progress goes to the status line, its answer is the result.
  async function streamed(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const token = stored(sessionStorage, "opcast-token");
    if (token) headers.Authorization = `Bearer ${token}`;
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the service ended the stream before its answer");
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const [kind, data] = text.slice(0, end).split("\n").map((line) => line.slice(line.indexOf(" ") + 1));
        const held = JSON.parse(data);
        if (kind === "answer") return held;
        if (kind === "error") throw new Error(held.message);
        $("status").textContent = held.total ? `${held.done.toLocaleString("en")} of ${held.total.toLocaleString("en")} layouts …` : "Laying out the space …";
      }
    }
  }
  function known(name) {
    if (!lists.has(name)) {
      const asked = call(`/v1/${name}`).then((found) => found[name]);
      asked.catch(() => lists.delete(name));
      lists.set(name, asked);
    }
    return lists.get(name);
  }
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    stored(sessionStorage, "opcast-token", $("token").value);
    $("token-form").hidden = true;
    show();
  });

  // --- fields -----------------------------------------------------------------------------------------------

  // A field: {name, label, kind: number | text | choice | flag, choices: [[value, label] …], usual}
  function field(spec) {
    const id = `field-${spec.name}`;
    let input;
    if (spec.kind === "choice" || spec.kind === "flag") {
      const choices = spec.kind === "flag" ? [["", "no"], ["true", "yes"]] : spec.choices;
      input = make("select", { id, name: spec.name }, ...choices.map(([value, label]) => make("option", { value }, label ?? value)));
      if (spec.usual !== undefined) input.value = spec.usual;
    } else {
      const list = spec.choices && make("datalist", { id: `${id}-list` }, ...spec.choices.map(([value]) => make("option", { value })));
      input = make("input", {
        id, name: spec.name, type: spec.kind === "number" ? "number" : "text", step: spec.step || (spec.kind === "number" ? 1 : null),
        min: spec.min, required: spec.required, placeholder: spec.placeholder, value: spec.usual, list: list && list.id,
      });
      if (list) return make("div", { class: "field" }, make("label", { for: id }, spec.label), input, list);
    }
    return make("div", { class: "field" }, make("label", { for: id }, spec.label), input);
  }
  const group = (title, ...specs) => make("fieldset", {}, make("legend", {}, title), ...specs.map(field));
  const number = (name, label, usual, extra = {}) => ({ name, label, kind: "number", min: 0, usual, ...extra });
  const choice = (name, label, choices, usual) => ({ name, label, kind: "choice", choices, usual });
  const named = (rows, what = "id") => rows.map((row) => [row[what], row[what]]);

  // The values of a form that differ from nothing, numbers as numbers.
  function valuesOf(form) {
    const values = {};
    for (const input of form.elements) {
      if (!input.name || input.value === "") continue;
      if (input.validity && input.validity.badInput) throw new Error(`${input.name} must be a number`);
      values[input.name] = input.type === "number" ? Number(input.value) : input.value === "true" ? true : input.value;
    }
    return values;
  }
  function fill(form, values) {
    for (const [name, value] of Object.entries(values)) {
      const input = form.elements.namedItem(name);
      if (input && "value" in input) input.value = value;
    }
  }

  // --- what can be asked --------------------------------------------------------------------------------------

  const DTYPES = ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_block", "int8", "mxfp8", "nvfp4", "w4a16", "w8a16"];
  const TABS = {
    op: {
      title: "One operator",
      lead: "How long one operator or collective takes on a device, with its interval and who answered.",
      async form(form, asked) {
        const [ops, devices, clusters] = await Promise.all([known("ops"), known("devices"), known("clusters")]);
        const chosen = ops.find((op) => op.kind === asked.kind) || ops.find((op) => op.kind === "gemm");
        const collective = chosen.family === "collective";
        const usual = { gemm: { m: 4096, n: 4096, k: 4096 } }[chosen.kind] || {};
        const dims = chosen.dims.map((dim) => (dim.choices.length
          ? choice(dim.name, dim.name, dim.choices.map((value) => [value]), dim.default)
          : number(dim.name, dim.name, dim.default ?? usual[dim.name] ?? "", { min: null, required: dim.default === null })));
        form.append(
          group("Operator", choice("kind", "kind", named(ops, "kind"), chosen.kind), ...dims, choice("dtype", "dtype", DTYPES.map((d) => [d]), "bf16")),
          group("Where", choice("device", "device", named(devices), "h100_sxm"),
            ...(collective ? [choice("cluster", "cluster", [["", "none"], ...named(clusters)]), number("nodes", "nodes")] : []),
            choice("cache", "inputs in cache", [["warm"], ["cold"]], "warm"), number("power_cap_w", "power cap, W", undefined, { step: "any" })),
          group("Picture", choice("vary", "vary", [["", "nothing"], ...chosen.dims.filter((d) => !d.choices.length).map((d) => [d.name])], usual.m ? "m" : "")),
        );
        form.elements.kind.addEventListener("change", () => go("op", { kind: form.elements.kind.value }));
      },
      body(values) {
        const { vary, device, cluster, nodes, cache, power_cap_w, ...op } = values;
        return { op, device, cluster, nodes, cache, power_cap_w };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/predict", body, signal);
        const curve = values.vary && Number(values[values.vary]) > 0 ? await varied(body, values.vary, signal) : null;
        return { path: "/v1/predict", body, found, shown: [opCard(found), curve], figures: { "latency, µs": found.latency_us, "low, µs": found.low_us, "high, µs": found.high_us, "roofline, µs": found.roofline_us } };
      },
    },
    step: {
      title: "One step of a model",
      lead: "A training step, a prompt, a token or a generation on a device or a cluster: time, memory, and where the time goes.",
      async form(form, asked) {
        const [models, devices, clusters, stacks, precisions] = await Promise.all(["models", "devices", "clusters", "stacks", "precisions"].map(known));
        const kind = asked.workload || "train";
        const train = kind === "train";
        const work = train
          ? [number("seq_len", "sequence length", 4096), number("micro_batch", "micro-batch", 1), number("global_batch", "global batch")]
          : [number("batch", "batch a data rank", 1), number("input_len", kind === "decode" ? "tokens in cache" : "input tokens", 1024), ...(kind === "generate" ? [number("output_len", "output tokens", 128)] : [])];
        form.append(
          group("Model", { name: "model", label: "model", kind: "text", choices: named(models), usual: "llama3_8b", required: true },
            choice("workload", "workload", [["train"], ["prefill"], ["decode"], ["generate"]], kind), ...work),
          group("Where", choice("cluster", "cluster", [["", "one device"], ...named(clusters)], "dgx_h100"), number("nodes", "nodes", 1),
            choice("device", "device", [["", "the cluster's"], ...named(devices)], "")),
          group("Layout", number("tp", "TP", 8), number("pp", "PP", 1), number("vpp", "VPP"), number("dp", "DP"), number("cp", "CP"), number("ep", "EP"),
            ...(train ? [choice("zero_stage", "ZeRO stage", [["", "0"], ["1"], ["2"], ["3"]]), { name: "sequence_parallel", label: "sequence parallel", kind: "flag" }] : [])),
          group("How", choice("stack", "framework", [["", "usual"], ...stacks.map((s) => [s.id, s.id])]), choice("precision", "precision", [["", "usual"], ...named(precisions)]),
            ...(train ? [choice("recompute", "recompute", [["", "none"], ["selective"], ["full"]])] : []),
            number("price_per_gpu_hour", "price a GPU hour", undefined, { step: "any" })),
        );
        form.elements.workload.addEventListener("change", () => go("step", { ...valuesOf(form) }));
      },
      body(values) {
        const body = { ...values };
        if (!body.cluster) for (const name of ["nodes", "tp", "pp", "vpp", "dp", "cp", "ep", "zero_stage", "sequence_parallel"]) delete body[name];
        if (body.zero_stage) body.zero_stage = Number(body.zero_stage);
        return body;
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/simulate", body, signal);
        const page = await call("/v1/simulate/report", body, signal);
        return { path: "/v1/simulate", body, found, shown: [found.fits ? null : tooLarge(found), reportFrame(page)], figures: stepFigures(found) };
      },
    },
    job: {
      title: "A whole training job",
      lead: "Days, GPU-hours, price and energy of a training job, with checkpoints, failures and restarts: 10,000 lives of it.",
      async form(form) {
        const [models, clusters] = await Promise.all(["models", "clusters"].map(known));
        const any = { step: "any" };
        form.append(
          group("Model", { name: "model", label: "model", kind: "text", choices: named(models), usual: "llama3_8b", required: true },
            number("seq_len", "sequence length", 4096), number("global_batch", "global batch", 256), number("tokens", "tokens, billions", 1000, { required: true, ...any })),
          group("Where", choice("cluster", "cluster", named(clusters), "dgx_h100"), number("nodes", "nodes", 4), number("tp", "TP", 2), number("pp", "PP"), choice("zero_stage", "ZeRO stage", [["", "0"], ["1"], ["2"], ["3"]], "1")),
          group("Failures", choice("fleet", "as often as", [["published", "published fleets"], ["llama3"], ["rsc1"], ["crusoe_h200"], ["opt_175b"], ["none", "never"]], "published"), number("minutes", "minutes to restart", 11, any), number("spares", "spare nodes")),
          group("Checkpoints", number("every_minutes", "minutes between, empty: best", undefined, any), number("store_gbps", "store, GB/s", undefined, any), { name: "asynchronous", label: "asynchronous", kind: "flag" }),
          group("Price and energy", number("price_per_gpu_hour", "price a GPU hour", undefined, any), number("pue", "PUE", 1.2, any), number("grid_g_per_kwh", "CO2, g a kWh", undefined, any)),
        );
      },
      body(values) {
        const { tokens, zero_stage, fleet, minutes, every_minutes, store_gbps, asynchronous, pue, grid_g_per_kwh, ...rest } = values;
        return { ...rest, tokens: tokens * 1e9, zero_stage: zero_stage ? Number(zero_stage) : undefined, failures: { fleet }, restart: { minutes }, checkpoint: { every_minutes, store_gbps, asynchronous }, energy: { pue, grid_g_per_kwh } };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/plan", body, signal);
        const page = await call("/v1/plan/report", body, signal);
        const figures = {};
        for (const [name, title] of [["days", "days"], ["gpu_hours", "GPU-hours"], ["cost", "price"], ["kwh", "kWh"], ["goodput", "goodput"]]) for (const part of ["p10", "p50", "p90"]) if (found[name]) figures[`${title} ${part}`] = found[name][part];
        return { path: "/v1/plan", body, found, shown: [reportFrame(page)], figures };
      },
    },
    serving: {
      title: "A served model",
      lead: "What users wait for under their traffic: first token, next tokens, whole answers; and how much a replica serves. The first answer for a model takes some ten seconds.",
      async form(form) {
        const [models, devices, clusters] = await Promise.all(["models", "devices", "clusters"].map(known));
        form.append(
          group("Model", { name: "model", label: "model", kind: "text", choices: named(models), usual: "llama3_8b", required: true },
            choice("policy", "engine", [["vllm"], ["sglang"], ["trtllm"], ["sarathi"], ["orca"], ["vllm_v0"]])),
          group("A replica", choice("device", "device", [["", "of the cluster"], ...named(devices)], "h100_sxm"), choice("cluster", "cluster", [["", "one device"], ...named(clusters)], ""), number("tp", "TP"), number("pp", "PP"), number("ep", "EP"), number("replicas", "replicas", 1)),
          group("Traffic", choice("arrival", "arrivals", [["poisson"], ["closed"], ["constant"], ["gamma"], ["bursty"]]), number("rate", "requests a second", 4, { step: "any" }), number("concurrency", "clients (closed)"),
            number("requests", "requests", 400), number("input", "input tokens", 1000), number("output", "output tokens", 200)),
          group("Users expect", number("ttft_ms", "TTFT, ms", 500, { step: "any" }), number("tpot_ms", "TPOT, ms", 40, { step: "any" })),
        );
      },
      body(values) {
        const { policy, arrival, rate, concurrency, requests, input, output, ttft_ms, tpot_ms, ...rest } = values;
        return { ...rest, scheduler: { policy }, slo: { ttft_ms, tpot_ms }, traffic: { arrival, rate, concurrency, requests, input: { mean: input }, output: { mean: output } } };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/serving", body, signal);
        const figures = { "requests/s": found.requests_per_s, goodput: found.goodput, "tokens/s/GPU": found.output_tokens_per_s_per_gpu, "KV peak": found.kv_peak };
        for (const name of ["ttft_ms", "tpot_ms", "e2e_ms"]) for (const part of ["p50", "p90", "p99"]) figures[`${name} ${part}`] = found[name][part];
        return { path: "/v1/serving", body, found, shown: [servingCards(found), cdf(found, values)], figures };
      },
    },
    search: {
      title: "The best layout",
      lead: "Every layout of a training step that fits together, and which of them is best. A click on a point shows its step.",
      async form(form) {
        const [models, clusters, stacks] = await Promise.all(["models", "clusters", "stacks"].map(known));
        const axis = (name, label) => ({ name, label, kind: "text", placeholder: "natural" });
        form.append(
          group("Model", { name: "model", label: "model", kind: "text", choices: named(models), usual: "llama3_8b", required: true },
            number("seq_len", "sequence length", 4096), number("global_batch", "global batch", 64)),
          group("Where", choice("cluster", "cluster", named(clusters), "dgx_h100"), number("nodes", "nodes", 1), choice("stack", "framework", [["", "usual"], ...named(stacks)])),
          group("Values, as 4, 8", ...["tp", "pp", "vpp", "cp", "ep", "zero_stage", "micro_batch", "recompute"].map((name) => axis(name, name))),
          group("Best is", choice("objective", "the least or most", [["step_time"], ["tokens_per_s_per_gpu"], ["mfu"], ["cost"], ["energy"], ["memory"]]),
            { name: "constraint", label: "which must hold", kind: "text", placeholder: "peak_gib <= 70" }),
        );
      },
      body(values) {
        const { objective, constraint, model, seq_len, global_batch, cluster, nodes, stack, ...axes } = values;
        const words = (text) => String(text).split(/[\s,]+/).filter(Boolean);
        const space = Object.fromEntries(Object.entries(axes).map(([name, text]) => [name, name === "recompute" ? words(text) : words(text).map(Number)]));
        const objectives = [...new Set([objective, objective === "memory" ? "step_time" : "memory"])];
        return { model, seq_len, global_batch, cluster, nodes, stack, space, objectives, constraints: constraint ? [constraint] : [] };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await streamed("/v1/search", body, signal);
        if (!found.best.length) throw new Error(found.notes[0]);
        return { path: "/v1/search", body, found, shown: [searchCards(found), pareto(found, values), bestTable(found)], figures: { step_time_s: found.best[0].step_time_s, "peak memory, GiB": found.best[0].peak_gib, tokens_per_s_per_gpu: found.best[0].tokens_per_s_per_gpu } };
      },
    },
    ways: {
      title: "The best way to serve",
      lead: "Every layout, batch and split into pools on so many GPUs: speed for users against use of GPUs. A click on a point plays its traffic. The first answer for a model takes a minute.",
      async form(form) {
        const [models, clusters, precisions] = await Promise.all(["models", "clusters", "precisions"].map(known));
        const axis = (name, label) => ({ name, label: label || name, kind: "text", placeholder: "natural" });
        form.append(
          group("Model", { name: "model", label: "model", kind: "text", choices: named(models), usual: "llama3_8b", required: true },
            number("input_len", "input tokens", 1000), number("output_len", "output tokens", 200), choice("precision", "precision", [["", "usual"], ...named(precisions)])),
          group("Where", choice("cluster", "cluster", named(clusters), "dgx_h100"), number("nodes", "nodes", 1)),
          group("Users expect", number("ttft_ms", "TTFT, ms", 1000, { step: "any" }), number("tpot_ms", "TPOT, ms", 50, { step: "any" })),
          group("Values, as 4, 8", ...["tp", "dp", "ep", "batch", "max_tokens"].map((name) => axis(name)), choice("pools", "pools", [["", "both"], ["together"], ["apart"]], ""),
            choice("policy", "engine", [["", "vllm"], ["sglang"], ["trtllm"]], "")),
        );
      },
      body(values) {
        const { model, input_len, output_len, precision, cluster, nodes, ttft_ms, tpot_ms, pools, policy, ...axes } = values;
        const words = (text) => String(text).split(/[\s,]+/).filter(Boolean).map(Number);
        const space = Object.fromEntries(Object.entries(axes).map(([name, text]) => [name, words(text)]));
        if (pools) space.pools = [pools];
        if (policy) space.policy = [policy];
        return { model, input_len, output_len, precision, cluster, nodes, slo: { ttft_ms, tpot_ms }, space };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await streamed("/v1/search/serving", body, signal);
        if (!found.best.length) throw new Error(found.notes[0]);
        const best = found.best[0];
        return { path: "/v1/search/serving", body, found, shown: [waysCards(found), waysFront(found, values), waysTable(found)], figures: { "tokens/s/GPU": best.tokens_per_s_per_gpu, "tokens/s/user": best.tokens_per_s_per_user, "TTFT, ms": best.ttft_ms, "TPOT, ms": best.tpot_ms } };
      },
    },
    fabric: {
      title: "The fabric",
      lead: "A collective on the links of a cluster, flow by flow: how long it takes, which links are full, and when.",
      async form(form, asked) {
        const [ops, clusters] = await Promise.all([known("ops"), known("clusters")]);
        const collectives = ops.filter((op) => op.family === "collective" && op.dims.some((dim) => dim.name === "ranks"));
        form.append(
          group("Collective", choice("kind", "kind", named(collectives, "kind"), asked.kind || "all_reduce"), number("size_bytes", "bytes", 67108864), number("ranks", "ranks", 16), number("stride", "stride", 1),
            { name: "all_groups", label: "all groups at once", kind: "flag" }),
          group("Where", choice("cluster", "cluster", named(clusters), "dgx_h100"), number("nodes", "nodes", 2)),
        );
      },
      body(values) {
        const { cluster, nodes, stride, all_groups, ...op } = values;
        return { op, cluster, nodes, stride: stride > 1 ? stride : undefined, all_groups, network: "flow" };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const [found, page] = await Promise.all([call("/v1/predict", body, signal), call("/v1/predict/report", body, signal)]);
        return { path: "/v1/predict/report", body, found, shown: [reportFrame(page)], figures: { "latency, µs": found.latency_us, "busbw, GB/s": found.network.busbw_gbps } };
      },
    },
    compare: {
      title: "Two answers side by side",
      lead: "Pin answers on the other pages with “Pin to compare”; here they stand beside each other.",
      alone: true,
      async form(form) { form.hidden = true; },
      async answer() { return { shown: [comparison()] }; },
    },
    known: {
      title: "What answers, and how well",
      lead: "The predictors of a device that are loaded: kind of operator, backend, and median error on shapes that none was trained on.",
      alone: true,
      async form(form) {
        const rows = await known("predictors");
        const devices = [...new Set(rows.map((row) => row.device))];
        form.append(group("", choice("device", "device", devices.map((device) => [device]), devices.includes("h100_sxm") ? "h100_sxm" : devices[0])));
        form.elements.device.addEventListener("change", () => go("known", valuesOf(form)));
      },
      async answer(values) {
        const rows = (await known("predictors")).filter((row) => row.current && row.device === values.device);
        return { shown: [table(`Predictors of ${values.device}`, ["kind", "backend", "version", "rows", "median APE %"], rows)] };
      },
    },
  };

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
  function stepFigures(found) {
    const figures = {};
    for (const name of ["step_time_s", "ttft_ms", "tpot_ms", "e2e_ms", "tokens_per_s_per_gpu", "mfu", "hfu", "power_w", "energy_j", "cost"]) {
      if (typeof found[name] === "number") figures[name] = found[name];
    }
    figures["peak memory, GiB"] = found.memory.peak_gib;
    for (const share of found.breakdown?.by_op || []) figures[`${share.kind}, s`] = share.time_s;
    return figures;
  }
  function tooLarge(found) {
    return make("div", { class: "cards" }, card("Does not fit", `${rounded(found.memory.peak_gib)} GiB`,
      [["weights", `${rounded(found.memory.weights_gib)} GiB`], ["activations", `${rounded(found.memory.activations_gib)} GiB`], ["to make it fit", found.memory.advice], ["times below", "if it did fit"]], "poor"));
  }
  function reportFrame(page) {
    const frame = make("iframe", { title: "Report of the step: breakdown, memory, timeline, provenance", loading: "lazy" });
    frame.src = URL.createObjectURL(new Blob([page], { type: "text/html" })) + (dark() ? "#dark" : "#light");
    return frame;
  }
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

  // `note` is what of a row stands in words below it, over its whole width.
  function table(caption, heads, rows, note) {
    const words = heads.map((head) => (rows.some((row) => row[head] && !/^[-+−–\d.,%() ]*$/.test(row[head])) ? "words" : null));
    const cells = (row) => heads.map((head, at) => make("td", { class: words[at] }, typeof row[head] === "number" ? rounded(row[head]) : String(row[head] ?? "")));
    const below = (row) => make("tr", {}, make("td", {}), make("td", { class: "words note", colspan: heads.length - 1 }, make("div", {}, `${note}: ${row[note]}`)));
    const lines = (row) => (note && row[note] ? [make("tr", { class: "noted" }, ...cells(row)), below(row)] : [make("tr", {}, ...cells(row))]);
    return make("section", {}, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head, at) => make("th", { scope: "col", class: words[at] }, head)))), make("tbody", {}, ...rows.flatMap(lines)))));
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

  const LAYOUT = ["tp", "pp", "vpp", "cp", "ep", "zero_stage", "sequence_parallel", "micro_batch", "recompute"];
  function servingCards(found) {
    const spread = (title, held) => card(title, seconds(held.p50 * 1e3), [["p90", seconds(held.p90 * 1e3)], ["p99", seconds(held.p99 * 1e3)], ["mean", seconds(held.mean * 1e3)]]);
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
      const [low, high] = [Math.log(Math.min(points[0][0], limit || Infinity)), Math.log(Math.max(points.at(-1)[0], limit || 0))];
      const x = (ms) => left + ((width - left - 16) * (Math.log(ms) - low)) / (high - low || 1);
      const y = (share) => top + (height - top - bottom) * (1 - share);
      const marks = [0, 1, 2, 3].map((at) => Math.exp(low + ((high - low) * at) / 3));
      return make("section", {}, make("h2", {}, title), make("p", { class: "lead" }, limit ? "Share of requests that had it within a time. Dashed: what users expect." : "Share of requests that had it within a time."),
        make("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: half within ${seconds(found[name].p50 * 1e3)}, nine in ten within ${seconds(found[name].p90 * 1e3)}` },
          ...[0, 0.5, 0.9, 1].flatMap((share) => [make("line", { class: "grid", x1: left, x2: width - 16, y1: y(share), y2: y(share) }), make("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`)]),
          ...marks.map((ms, at) => make("text", { x: x(ms), y: height - 12, "text-anchor": ["start", "middle", "middle", "end"][at] }, seconds(Number((ms * 1e3).toPrecision(2))))),
          limit ? make("line", { class: "roof", x1: x(limit), x2: x(limit), y1: top, y2: height - bottom }) : null,
          make("path", { class: "line", d: points.map(([ms, share], at) => `${at ? "L" : "M"}${x(ms).toFixed(1)},${y(share).toFixed(1)}`).join("") })));
    };
    return make("div", {}, chart("ttft_ms", "Time to first token", Number(values.ttft_ms)), chart("tpot_ms", "Time per output token", Number(values.tpot_ms)));
  }

  const says = (row, name) => row[name] && (row[name] !== 1 || name === "zero_stage") && row[name] !== "none" && (name !== "sequence_parallel" || row.tp > 1);
  const layout = (row) => LAYOUT.filter((name) => says(row, name)).map((name) => `${name}=${row[name]}`).join(" ") || "data parallel only";
  function searchCards(found) {
    const best = found.best[0];
    return make("div", { class: "cards" },
      card("Best layout", layout(best), [["step", seconds(best.step_time_s * 1e6)], ["peak memory", `${rounded(best.peak_gib)} GiB`], ["MFU", percent(best.mfu)]]),
      card("Searched", `${rounded(found.points)} layouts`, [["simulated", rounded(found.evaluated)], ["left out by bounds and memory", rounded(found.pruned)], ["tied with the best", rounded(found.ties)]]));
  }
  function bestTable(found) {
    const rows = found.best.map((row) => ({ "": row.rank, layout: layout(row), "step, s": row.step_time_s, "tokens/s/GPU": row.tokens_per_s_per_gpu, "MFU, %": 100 * row.mfu, GiB: row.peak_gib, tie: row.tie, "than the next": row.reason }));
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
  const way = (row) => (row.pools === "together" ? `each of ${row.replicas}: ${degrees(row, "")} batch=${row.batch}`
    : `prefill on ${row.prefill_replicas}: ${degrees(row, "prefill_")}, decode on ${row.replicas}: ${degrees(row, "")} batch=${row.batch}`);
  function waysCards(found) {
    const best = found.best[0];
    return make("div", { class: "cards" },
      card("Best way to serve", way(best), [["GPUs", rounded(best.devices)], ["output tokens/s a GPU", rounded(best.tokens_per_s_per_gpu)], ["requests/s", rounded(best.requests_per_s)]]),
      card("For users", `${rounded(best.tokens_per_s_per_user)} tokens/s`, [["TTFT", seconds(best.ttft_ms * 1e3)], ["TPOT", seconds(best.tpot_ms * 1e3)], ["whole answer", seconds(best.e2e_ms * 1e3)]]),
      card("Searched", `${rounded(found.points)} ways`, [["looked at", rounded(found.evaluated)], ["left out", rounded(found.pruned)], ["tied with the best", rounded(found.ties)]]));
  }
  function waysTable(found) {
    const rows = found.best.map((row) => ({ "": row.rank, "way to serve": way(row), "tokens/s/GPU": row.tokens_per_s_per_gpu, "tokens/s/user": row.tokens_per_s_per_user, "TTFT, ms": row.ttft_ms, "TPOT, ms": row.tpot_ms, tie: row.tie, "than the next": row.reason }));
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
      const asked = { model: values.model, cluster: row.cluster, nodes: Math.ceil((row.tp * row.pp * row.dp) / 8), tp: row.tp, policy: row.policy, device: "",
        arrival: "closed", concurrency: row.batch * row.dp, requests: Math.min(4 * row.batch * row.dp, 2000), input: values.input_len, output: values.output_len };
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

  // How to ask the same elsewhere, and the whole answer.
  function elsewhere(path, body, found) {
    const text = JSON.stringify(body);
    const curl = `curl -s ${location.origin}${path} -H 'Content-Type: application/json' -d '${text.replaceAll("'", "'\\''")}'`;
    return make("section", {},
      make("details", {}, make("summary", {}, "The same question over HTTP"), make("pre", { tabindex: 0 }, curl)),
      make("details", {}, make("summary", {}, "The whole answer as JSON"), make("pre", { tabindex: 0 }, JSON.stringify(found, null, 1))));
  }

  // --- comparing ---------------------------------------------------------------------------------------------------

  const pins = () => JSON.parse(stored(sessionStorage, "opcast-pins") || "[]");
  function pin(tab, body, figures) {
    stored(sessionStorage, "opcast-pins", JSON.stringify([...pins(), { tab, body, figures }].slice(-6)));
    $("status").textContent = `Pinned; ${pins().length} ${pins().length === 1 ? "answer" : "answers"} to compare.`;
  }
  function flat(body, prefix = "") {
    return Object.entries(body).flatMap(([name, value]) => (value && typeof value === "object" ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]]));
  }
  function comparison() {
    const held = pins();
    if (held.length < 2) return make("p", { class: "caption" }, `${held.length} of at least two answers are pinned.`);
    const rows = [];
    const settings = held.map((each) => new Map(flat(each.body)));
    for (const name of new Set(settings.flatMap((each) => [...each.keys()]))) {
      const values = settings.map((each) => each.get(name));
      if (values.some((value) => value !== values[0])) rows.push({ what: name, ...Object.fromEntries(values.map((value, at) => [`answer ${at + 1}`, value ?? "–"])) });
    }
    for (const name of new Set(held.flatMap((each) => Object.keys(each.figures)))) {
      const values = held.map((each) => each.figures[name]);
      const base = values[0];
      rows.push({ what: name, ...Object.fromEntries(values.map((value, at) => {
        const change = at && base && typeof value === "number" ? ` (${value >= base ? "+" : "−"}${Math.abs((100 * (value - base)) / base).toFixed(1)} %)` : "";
        return [`answer ${at + 1}`, typeof value === "number" ? rounded(value) + change : "–"];
      })) });
    }
    const clear = make("button", { type: "button", onclick: () => { stored(sessionStorage, "opcast-pins", "[]"); show(); } }, "Let go of all");
    return make("div", {}, table("Pinned answers", ["what", ...held.map((_, at) => `answer ${at + 1}`)], rows), make("p", { class: "caption" }, clear));
  }

  // --- the page: its address says what is asked ------------------------------------------------------------------------

  let running = null;
  function address() {
    const [tab, query] = location.hash.slice(1).split("?");
    return { tab: TABS[tab] ? tab : "op", asked: Object.fromEntries(new URLSearchParams(query || "")) };
  }
  function go(tab, values) {
    const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== undefined));
    const hash = `#${tab}${query.size ? `?${query}` : ""}`;
    if (location.hash === hash) show();
    else location.hash = hash;
  }
  async function show() {
    const { tab, asked } = address();
    const page = TABS[tab];
    running?.abort();
    for (const link of document.querySelectorAll(".top nav a")) link.toggleAttribute("aria-current", false);
    $(`tab-${tab}`).setAttribute("aria-current", "page");
    document.title = `${page.title} · opcast`;
    $("heading").textContent = page.title;
    $("lead").textContent = page.lead;
    $("result").replaceChildren();
    $("error").hidden = true;
    $("status").textContent = "";
    const old = $("question");
    const form = make("form", { id: "question", class: "card", autocomplete: "off", novalidate: true });
    old.replaceWith(form);
    form.parentElement.classList.toggle("alone", Boolean(page.alone));
    try {
      await page.form(form, asked);
    } catch (error) {
      return complain(error);
    }
    fill(form, asked);
    if (page.alone) return ask(tab, page, form);
    form.append(make("div", { class: "row" }, make("button", { class: "main", type: "submit" }, "Ask")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      try { go(tab, valuesOf(form)); } catch (error) { complain(error); }
    });
    if (Object.keys(asked).length > 1) ask(tab, page, form);
  }
  async function ask(tab, page, form) {
    const mine = (running = new AbortController());
    const button = form.querySelector("button.main");
    if (button) button.disabled = true;
    $("status").textContent = "Asking …";
    const began = performance.now();
    try {
      const made = await page.answer(valuesOf(form), mine.signal);
      $("status").textContent = page.alone ? "" : `Answered in ${seconds((performance.now() - began) * 1e3)}.`;
      const keep = made.figures && make("p", { class: "caption" }, make("button", { type: "button", onclick: () => pin(tab, made.body, made.figures) }, "Pin to compare"));
      $("result").replaceChildren(...[...made.shown, keep, made.path && elsewhere(made.path, made.body, made.found)].filter(Boolean));
    } catch (error) {
      if (error.name !== "AbortError") complain(error);
    } finally {
      if (button) button.disabled = false;
    }
  }
  function complain(error) {
    $("status").textContent = "";
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
  window.addEventListener("hashchange", show);
  show();
})();
